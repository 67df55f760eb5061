"""Equality of what runs leave behind."""

from __future__ import annotations

from typing import Any

import torch

MEASURED = ("images_per_second", "data_wait_fraction", "peak_memory_mib")
"""Keys of metrics.jsonl that differ from run to run."""


def by_part(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint by the first part of their names, and the counts of all ranks."""
    parts: dict[str, Any] = {"per_rank": state["per_rank"]}
    for name, tensor in state["tensors"].items():
        part, _, rest = name.partition("/")
        parts.setdefault(part, {})[rest] = tensor
    return parts


def without_clock(state: dict[str, Any]) -> dict[str, Any]:
    """What must be equal in two runs of one experiment, whenever and wherever they ran."""
    tensors = {k: v for k, v in state["tensors"].items() if k != "history/seconds"}
    row = {k: v for k, v in state["row"].items() if k not in MEASURED}
    return {**{k: v for k, v in state.items() if k != "config"}, "tensors": tensors, "row": row}


def assert_bit_equal(a: Any, b: Any, where: str = "") -> None:
    """Types, keys, dtypes and every bit of nested dictionaries of tensors and plain values."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_bit_equal(a[key], b[key], f"{where}.{key}")
    else:
        assert a == b, where
