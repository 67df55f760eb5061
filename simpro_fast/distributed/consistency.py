"""Do all ranks run the same thing? Compared before the first step, in clear text.

Facts travel as JSON bytes, through the store or in a tensor. Nothing is ever unpickled, so a
rank (or whoever pretends to be one) cannot run code on another.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from simpro_fast.config import Config, flatten
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.machine import host_name
from simpro_fast.utils.provenance import git_commit, library_versions, source_digest

Facts = dict[str, str]

_SHOWN = 6


def fingerprint(config: Config, device_type: str) -> Facts:
    """What must be equal on all ranks before they communicate.

    The source files decide whether the code is the same; the commit only helps to find out why.
    """
    commit = git_commit()
    return {
        "code": f"{source_digest()[:12]}{f' (commit {commit})' if commit else ''}",
        **library_versions(),
        "device": device_type,
        **{key: json.dumps(value) for key, value in flatten(config).items()},
    }


def difference(everyone: list[Facts]) -> str | None:
    """One line that names the first rank whose facts differ from rank 0's, or None.

    Args:
        everyone: facts by rank; `host` says where a rank runs and is not compared.
    """
    first = everyone[0]
    differing = [rank for rank, facts in enumerate(everyone) if _unequal(first, facts)]
    if not differing:
        return None
    rank, facts = differing[0], everyone[differing[0]]
    keys = _unequal(first, facts)
    shown = ", ".join(f"{k} {facts.get(k)} against {first.get(k)}" for k in keys[:_SHOWN])
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    others = f" (and {len(differing) - 1} more ranks)" if len(differing) > 1 else ""
    return (
        f"rank {rank} on {facts['host']}{others} differs from rank 0 on {first['host']}: "
        f"{shown}{rest}; all ranks must have the same code, versions, configuration and files"
    )


def _unequal(first: Facts, other: Facts) -> list[str]:
    keys = dict.fromkeys([*first, *other])
    return [k for k in keys if k != "host" and _compared(first, k) != _compared(other, k)]


def _compared(facts: Facts, key: str) -> str | None:
    value = facts.get(key)
    # Without git, or outside a clone, there is no commit; the digest in front of it decides.
    return value.partition(" ")[0] if key == "code" and value else value


def compare(store: dist.Store, rank: int, world_size: int, facts: Facts) -> list[Facts]:
    """Read the facts of all ranks, by rank, once all have come.

    Raises:
        ConfigError: ranks differ; every rank raises the same line.
        dist.DistError: a rank did not come within the store's timeout.
    """
    store.set(f"facts/{rank}", json.dumps({"host": host_name(), **facts}))
    keys = [f"facts/{r}" for r in range(world_size)]
    everyone: list[Facts] = [json.loads(text) for text in store.multi_get(keys)]
    if unequal := difference(everyone):
        wait_for_all(store, "read", rank, world_size, 5.0)
        raise ConfigError(unequal)
    return everyone


def wait_for_all(store: dist.Store, key: str, rank: int, world_size: int, seconds: float) -> None:
    """Say that this rank is done with the store, which dies with rank 0; that one waits."""
    store.add(key, 1)
    deadline = time.monotonic() + seconds
    while rank == 0 and store.add(key, 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.02)
