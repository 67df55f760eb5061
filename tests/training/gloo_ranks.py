"""Runs a function on several gloo ranks for a test, with a hang time-out."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    function: Callable[..., Any], folder: Path, *args: Any, world_size: int = 2, timeout: int = 90
) -> list[Any]:
    """Results of `function(rank, world_size, *args)` by rank; any failure fails the caller.

    `function` must be a module-level function; its result goes through torch.save in `folder`.
    """
    context = mp.start_processes(
        _child,
        (function, world_size, folder, timeout, args),
        nprocs=world_size,
        join=False,
        start_method="spawn",
    )
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"ranks still running after {timeout} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def _child(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    timeout: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # Ranks meet in a file, so that no port has to be chosen.
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    torch.save(function(rank, world_size, *args), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
