"""Equality of what runs leave behind, and the rule for what is compared how.

Two ways of computing the same (ranks, engines, micro-batches, a step recorded and replayed) are
compared

- bit for bit where they do the same operations in the same order;
- in float64 (`train.precision: fp64`) where the order differs, within rounding in float64. Not in
  float32 over steps of training: CPUs round differently, and what a step chooses (a mask, an
  argmax, the side of a kink) turns a last bit into any difference, which no tolerance foresees;
- in float32 for one pass without such a choice only, far above rounding, far below any fault.
"""

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


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    """Tensors within an absolute and relative tolerance, in dictionaries too; 0: bit-equal."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key], tolerance)


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
