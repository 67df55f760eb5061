"""Do all ranks run the same thing? Compared before the first step, in clear text.

Facts travel as JSON bytes, through the store or in a tensor. Nothing is ever unpickled, so a
rank (or whoever pretends to be one) cannot run code on another.
"""

from __future__ import annotations

import json
import time
from itertools import groupby

import torch.distributed as dist

from simpro_fast.config import Config, flatten
from simpro_fast.distributed.rendezvous import wait_for_key
from simpro_fast.utils.errors import ConfigError, UserError
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


def rendezvous(
    store: dist.Store, rank: int, world_size: int, facts: Facts, timeout: float
) -> list[tuple[str, int]]:
    """Wait until all ranks are there and compare them. Rank 0 reads everything, the others one key.

    Returns:
        (host, number of ranks) in the order of ranks, on rank 0; empty on the others.

    Raises:
        ConfigError: ranks differ; every rank raises the same line.
        UserError: ranks are missing after `timeout` seconds; likewise.
    """
    deadline = time.monotonic() + timeout
    store.set(f"facts/{rank}", json.dumps({"host": host_name(), **facts}))
    if rank:
        # A little longer than rank 0, which knows who is missing.
        if not wait_for_key(store, "verdict", deadline + 10):
            raise UserError(f"rank 0 did not answer within {timeout + 10:g} s; see its log")
        verdict = store.get("verdict").decode()
        store.add("read", 1)
        _raise(verdict)
        return []
    missing = [r for r in range(world_size) if not wait_for_key(store, f"facts/{r}", deadline)]
    if missing:
        few = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        verdict = (
            f"missing: {len(missing)} of {world_size} ranks (rank {few}) did not come within "
            f"{timeout:g} s; start them, or check the host file and expect_world_size"
        )
        everyone: list[Facts] = []
    else:
        keys = [f"facts/{r}" for r in range(world_size)]
        everyone = [json.loads(text) for text in store.multi_get(keys)]
        verdict = difference(everyone) or ""
    store.set("verdict", verdict)
    if verdict:
        _linger(store, world_size - 1 - len(missing))
    _raise(verdict)
    return [(host, len(list(group))) for host, group in groupby(f["host"] for f in everyone)]


def _raise(verdict: str) -> None:
    if verdict.startswith("missing: "):
        raise UserError(verdict.removeprefix("missing: "))
    if verdict:
        raise ConfigError(verdict)


def _linger(store: dist.Store, readers: int) -> None:
    """The store dies with rank 0, so let the others read the verdict first."""
    deadline = time.monotonic() + 5
    while store.add("read", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.02)
