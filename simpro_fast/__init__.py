"""simpro_fast: realistic long-tailed semi-supervised learning (SimPro, ICML 2024) at speed.

`SimPro` and `FixMatch` are `nn.Module`s that fit any training loop; the training system around
them starts at `launch/train.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpro_fast.methods import FixMatch, SimPro

__version__ = "0.1.0"
__all__ = ["FixMatch", "SimPro", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that reading a configuration or printing help does not pay for importing torch.
    if name in ("SimPro", "FixMatch"):
        from simpro_fast import methods

        return getattr(methods, name)
    raise AttributeError(f"module 'simpro_fast' has no attribute '{name}'")
