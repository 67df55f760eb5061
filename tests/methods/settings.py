"""What methods under test are built from."""

from __future__ import annotations

from typing import Any

from simpro_fast.methods import Setting


def setting(labeled_counts: tuple[int, ...] = (40, 15, 5), **changes: Any) -> Setting:
    """A run of 12 periods of 5 steps, 3 classes unless told otherwise, 9 unlabeled images."""
    usual: dict[str, Any] = {
        "num_unlabeled": 9,
        "strong_views": 2,
        "labeled_views": 2,
        "alpha": 1.0,
        "features": 4,
        "batch_size": 6,
        "mu": 1,
        "period": 5,
        "periods": 12,
        "image_size": 8,
    }
    return Setting(labeled_counts=labeled_counts, **{**usual, **changes})
