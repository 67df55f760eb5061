"""This process among all ranks: device, threads, process group.

The same program runs under `deepspeed`, `torchrun` and plain `python`; all three end in one
`Ranks` value, and everything else asks that.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import psutil
import torch
import torch.distributed as dist

from simpro_fast.config import Config
from simpro_fast.distributed.consistency import Facts, compare, difference, fingerprint
from simpro_fast.distributed.environment import (
    local_rank_from_environment,
    number_from_environment,
    rank_from_environment,
    world_size_from_environment,
)
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.machine import cpu_cores, host_name, private_folder, reuse_freed_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `world_size`, `local_rank` on this machine, `device`."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    hosts: tuple[tuple[str, int], ...] = ()
    """(host, number of ranks) in the order of ranks; known where there are several."""
    store: dist.Store | None = None
    """Where the ranks of a launch find each other, and leave notes; None: they were joined."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the tensor itself with one rank."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_module(self, module: torch.nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0."""
        if self.world_size > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The vectors [n] of all ranks as rows of a matrix [world_size, n], on every rank."""
        if self.world_size == 1:
            return values[None].clone()
        rows = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(rows, values.contiguous())
        return torch.stack(rows)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The byte strings of all ranks, by rank; their lengths may differ."""
        if self.world_size == 1:
            return [mine]
        lengths = self.gather(torch.tensor([len(mine)], device=self.device))[:, 0].tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        rows = self.gather(padded).cpu()
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]

    def agree_on(self, facts: Facts) -> None:
        """Compare facts (name to value, in clear text) over all ranks.

        Raises:
            ConfigError: on every rank, with the rank, its host and both values.
        """
        if self.world_size == 1:
            return
        mine = json.dumps({"host": host_name(), **facts}).encode()
        unequal = difference([json.loads(text) for text in self.gather_bytes(mine)])
        if unequal:
            raise ConfigError(unequal)


def start_ranks(config: Config) -> Ranks:
    """Choose the device, set threads, create the process group. Call once, after `check_launch`.

    Raises:
        ConfigError: ranks have different code, versions or configuration; on every rank.
        UserError: the ranks do not find each other, or there are too few GPUs.
    """
    world, rank = world_size_from_environment(), rank_from_environment()
    local_rank = local_rank_from_environment()
    # torchrun and the deepspeed launcher name it differently.
    local_world = number_from_environment(
        "LOCAL_WORLD_SIZE", number_from_environment("LOCAL_SIZE", world)
    )
    if world > 1:
        _keep_kernels_here()
    use_cuda = config.device != "cpu" and torch.cuda.is_available()
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible; "
            "start as many ranks as GPUs"
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
        choose_algorithms(config)
    else:
        reuse_freed_memory()
    # Equal thread counts make repeats and resumes bit-equal; torchrun and deepspeed differ here.
    torch.set_num_threads(config.train.threads or max(1, cpu_cores() // local_world))
    ranks = Ranks(rank, local_rank, world, local_world, device)
    if dist.is_initialized():
        ranks.agree_on(fingerprint(config, device.type))
    elif world > 1:
        ranks = _find_and_connect(config, ranks)
    elif config.distributed.engine == "deepspeed":
        # An in-memory store: a single rank opens no port at all.
        _connect(config, ranks, dist.HashStore())
    return ranks


def choose_algorithms(config: Config) -> None:
    """How cuDNN and cuBLAS compute, as `train.cudnn_benchmark` and `train.tf32` say."""
    static = config.train.strong_forward == "all" or config.train.compile != "none"
    torch.backends.cudnn.benchmark = config.train.cudnn_benchmark and static
    torch.backends.cudnn.allow_tf32 = config.train.tf32
    torch.backends.cuda.matmul.allow_tf32 = config.train.tf32


def _find_and_connect(config: Config, ranks: Ranks) -> Ranks:
    """Find the other ranks, compare them, and only then let a backend connect them."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    timeout = timedelta(seconds=config.distributed.start_timeout)
    try:
        found = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)
        store = dist.PrefixStore("simpro_fast", next(found)[0])
        store.set_timeout(timeout)
        facts = fingerprint(config, ranks.device.type)
        everyone = compare(store, ranks.rank, ranks.world_size, facts)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise UserError(
            f"rank {ranks.rank} of WORLD_SIZE={ranks.world_size} on {host_name()} does not meet "
            f"the others at MASTER_ADDR={address}, MASTER_PORT={port} within {timeout} "
            f"({str(error).splitlines()[0][:200]}); are all ranks started, is rank 0 at that "
            "address, is the port free, does a firewall stand between?"
        ) from None
    # Left alone, gloo listens on whatever this machine's own name stands for.
    interface = interface_towards(address, int(port))
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    _connect(config, ranks, store)
    hosts = groupby(facts["host"] for facts in everyone)
    return replace(ranks, hosts=tuple((host, len(list(g))) for host, g in hosts), store=store)


def interface_towards(address: str, port: int) -> str | None:
    """Name of the network interface whose address this machine uses to talk to `address`.

    None where it cannot be told. Nothing is sent.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            mine = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except (OSError, ValueError):
        return None
    if mine.is_loopback:
        return "lo"
    addresses = psutil.net_if_addrs().items()
    owners = {one.address.partition("%")[0]: name for name, all_ in addresses for one in all_}
    return owners.get(str(mine))


def _keep_kernels_here() -> None:
    """Compiled kernels on a disk of each machine: a home folder that ranks share is full of races.

    `deepspeed --hostfile` passes no such variable on.
    """
    if "TRITON_CACHE_DIR" in os.environ:
        return
    folder = private_folder("simpro-triton")
    if folder is None:
        logger.warning("no private folder in %s; set TRITON_CACHE_DIR", tempfile.gettempdir())
    else:
        os.environ["TRITON_CACHE_DIR"] = str(folder)


def _connect(config: Config, ranks: Ranks, store: dist.Store) -> None:
    try:
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=config.distributed.collective_timeout),
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"the ranks cannot be connected ({reason}); check network and firewall, and "
            f"GLOO_SOCKET_IFNAME, here {os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}"
        ) from None
    # DeepSpeed reads these even when the group already exists.
    for name, value in (
        ("RANK", ranks.rank),
        ("LOCAL_RANK", ranks.local_rank),
        ("WORLD_SIZE", ranks.world_size),
    ):
        os.environ.setdefault(name, str(value))


def stop_ranks() -> None:
    """Leave the process group, if there is one; another may follow in the same process."""
    if not dist.is_initialized():
        return
    communication: Any = sys.modules.get("deepspeed.comm.comm")
    if communication is not None and communication.cdb is not None:
        communication.destroy_process_group()  # it keeps groups of its own, which go stale
        communication.cdb = None
    else:
        dist.destroy_process_group()
