"""Who am I among the ranks: environment, device, process group, threads.

The same program runs under `deepspeed`, `torchrun` and plain `python`; all three end in one
`Ranks` value, and everything else asks that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from simpro_fast.config import Config
from simpro_fast.errors import ConfigError, UserError


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `world_size`, `local_rank` on this machine, `device`."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

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

    def agree_on(self, what: str, digest: str) -> None:
        """Raise on every rank unless all ranks hold the same hexadecimal digest."""
        if self.world_size == 1:
            return
        mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        for rank, other in enumerate(everyone):
            if not torch.equal(other, everyone[0]):
                raise ConfigError(
                    f"rank {rank} has another {what} than rank 0: "
                    f"{bytes(other.tolist()).hex()[:12]} against "
                    f"{bytes(everyone[0].tolist()).hex()[:12]}; "
                    "all ranks must see the same files, configuration and code"
                )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not a number; unset it"
        ) from None


def world_size_from_environment() -> int:
    return _number("WORLD_SIZE", 1)


def rank_from_environment() -> int:
    return _number("RANK", 0)


def check_launch(config: Config) -> None:
    """Refuse a launch that cannot work, before any process group exists.

    Raises:
        ConfigError: naming both numbers, or the missing device.
    """
    world, rank = world_size_from_environment(), rank_from_environment()
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(
            f"RANK={rank} of WORLD_SIZE={world} in the environment is impossible; "
            "start through deepspeed or torchrun, or unset both"
        )
    expected = config.distributed.expect_world_size
    if expected is not None and expected != world:
        raise ConfigError(
            f"distributed.expect_world_size={expected}, but {world} rank(s) were started; "
            "check the host file and the launcher's arguments"
        )
    batch = config.data.batch_size
    if batch % world:
        below, above = batch // world * world, -(-batch // world) * world
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"data.batch_size={batch} does not divide over {world} ranks; "
            f"the nearest that do: {nearest}"
        )
    micro, labeled = config.distributed.micro_batch, batch // world
    if micro is not None and labeled % micro:
        divisors = [n for n in range(1, labeled + 1) if labeled % n == 0]
        near = [
            max((n for n in divisors if n < micro), default=None),
            min((n for n in divisors if n > micro), default=None),
        ]
        raise ConfigError(
            f"distributed.micro_batch={micro} does not divide the {labeled} labeled images of "
            f"each of {world} rank(s); the nearest that do: "
            + " or ".join(str(n) for n in near if n is not None)
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no CUDA device is visible; use device=cpu or device=auto")
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.method.impl == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "method.impl=triton needs a CUDA device (or TRITON_INTERPRET=1, for tests); "
            "use method.impl=auto or eager"
        )


def start_ranks(config: Config) -> Ranks:
    """Choose the device, set threads, create the process group. Call once, after `check_launch`."""
    world, rank = world_size_from_environment(), rank_from_environment()
    local_rank = _number("LOCAL_RANK", 0)
    # torchrun and the deepspeed launcher name it differently.
    local_world = _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", world))
    use_cuda = config.device != "cpu" and torch.cuda.is_available()
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible; "
            "start as many ranks as GPUs"
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    # Equal thread counts make repeats and resumes bit-equal; torchrun and deepspeed differ here.
    torch.set_num_threads(config.train.threads or max(1, cpu_cores() // local_world))
    ranks = Ranks(rank, local_rank, world, local_world, device)
    if config.distributed.engine == "deepspeed" or world > 1:
        timeout = timedelta(seconds=config.distributed.collective_timeout)
        _create_process_group(ranks, timeout)
    return ranks


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _create_process_group(ranks: Ranks, timeout: timedelta) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if ranks.world_size == 1:
        # An in-memory store: a single rank opens no port at all.
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    else:
        dist.init_process_group(backend, timeout=timeout)
    # DeepSpeed reads these even when the group already exists.
    for name, value in (
        ("RANK", ranks.rank),
        ("LOCAL_RANK", ranks.local_rank),
        ("WORLD_SIZE", ranks.world_size),
    ):
        os.environ.setdefault(name, str(value))


def stop_ranks() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
