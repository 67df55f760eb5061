"""Checks that all ranks make together: who is there, links, the shared folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from simpro_fast.cli.checks.table import Line
from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.utils.machine import cpu_cores, host_name

ONE = Line("skipped", "one rank; start the doctor as you start training to check several")
# Below this many GB/s the gradients of a ResNet-50 (102 MB) take longer than its backward pass.
_SLOW_NCCL = 5.0


def check_ranks(config: Config, ranks: Ranks) -> Line:
    """Number of ranks and hosts, and whether there are as many as the configuration expects."""
    hosts = ", ".join(f"{host} x{count}" for host, count in ranks.hosts[:8]) or host_name()
    more = f" and {len(ranks.hosts) - 8} more hosts" if len(ranks.hosts) > 8 else ""
    text = f"{ranks.world_size} on {hosts}{more}; code and versions are the same on all"
    if ranks.world_size == 1:
        text = f"1 on {host_name()}"
    expected = config.distributed.expect_world_size
    if expected not in (None, ranks.world_size):
        return Line(
            "problem",
            f"{text}; distributed.expect_world_size={expected}",
            "check the host file and the launcher's arguments",
        )
    per_core = ranks.local_world_size / cpu_cores()
    if ranks.device.type == "cuda" and per_core > 0.5:
        return Line(
            "warning",
            f"{text}; only {cpu_cores()} processor core(s) for {ranks.local_world_size} ranks here",
            "give every rank two cores or more (Slurm: --cpus-per-task)",
        )
    return Line("ok", text)


def check_links(ranks: Ranks) -> Line:
    """Bandwidth and latency of all-reduce, the collective that training uses."""
    if ranks.world_size == 1:
        return ONE
    cuda = ranks.device.type == "cuda"
    values = torch.ones((64 if cuda else 4) * 2**18, device=ranks.device)  # 64 or 4 MiB
    small = torch.ones(2, device=ranks.device)
    seconds, latency = _timed(values, 5), _timed(small, 20)
    # What each link carries in a ring: 2 (n - 1) / n of the bytes.
    share = 2 * (ranks.world_size - 1) / ranks.world_size
    rate = share * values.numel() * values.element_size() / seconds / 1e9
    text = (
        f"all-reduce over {'NCCL' if cuda else 'gloo'}: {rate:.2f} GB/s per rank with "
        f"{values.numel() * 4 >> 20} MiB, {1e6 * latency:.0f} us with 8 bytes"
    )
    if cuda and rate < _SLOW_NCCL:
        cure = "see NCCL_DEBUG=INFO for the link it uses; set NCCL_SOCKET_IFNAME or NCCL_IB_HCA"
        return Line("warning", text, cure)
    return Line("ok", text)


def _timed(values: torch.Tensor, repeats: int) -> float:
    """Median seconds of an all-reduce of `values`."""
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[2:])[repeats // 2]


def check_folder(ranks: Ranks, folder: Path) -> Line:
    """Can every rank write into the run's folder, and does every rank see the others' files?"""
    nonce = ranks.gather_bytes(os.urandom(6).hex().encode())[0].decode()
    mine, error = folder / f".doctor-{nonce}-{ranks.rank}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(nonce)
    except OSError as failed:
        error = failed.strerror or str(failed)
    ranks.barrier()
    others = [folder / f".doctor-{nonce}-{rank}" for rank in range(ranks.world_size)]
    hidden = [rank for rank, path in enumerate(others) if not path.is_file()]
    ranks.barrier()
    if not error:
        mine.unlink(missing_ok=True)
    if error:
        cure = "choose another folder (--output, output_dir) or change its permissions"
        return Line("problem", f"{folder} cannot be written ({error})", cure)
    if hidden:
        return Line(
            "problem",
            f"{folder} is not shared: the file of rank {hidden[0]} is not visible here",
            "put output_dir on a file system that all hosts mount",
        )
    seen = "by every rank, and each sees the others' files" if ranks.world_size > 1 else "here"
    return Line("ok", f"{folder} can be written {seen}")
