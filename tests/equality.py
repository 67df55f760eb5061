"""Equality of what runs leave behind."""

from __future__ import annotations

from typing import Any

import torch


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
