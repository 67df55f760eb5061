"""What the launcher's environment says of this process, and launches that cannot work."""

from __future__ import annotations

import os
import socket

import torch

from simpro_fast.config import Config
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.machine import host_name


def number_from_environment(name: str, default: int) -> int:
    """An integer that the launcher sets; anything else there is a `ConfigError`."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not a number; unset it"
        ) from None


def world_size_from_environment() -> int:
    return number_from_environment("WORLD_SIZE", 1)


def rank_from_environment() -> int:
    return number_from_environment("RANK", 0)


def local_rank_from_environment() -> int:
    """Rank among those of this host; without a launcher that says it, the rank itself."""
    return number_from_environment("LOCAL_RANK", rank_from_environment())


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
    if world > 1:
        _refuse_missing_interface()
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


def _refuse_missing_interface() -> None:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = [name for _, name in socket.if_nameindex()]
    if set(filter(None, chosen.split(","))) - set(there):
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={chosen}: {host_name()} has no such network interface, but "
            f"{', '.join(there)}; correct the variable or unset it"
        )
