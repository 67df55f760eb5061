"""simpro_fast: realistic long-tailed semi-supervised learning (SimPro, ICML 2024) at speed.

`SimPro` and `FixMatch` are `nn.Module`s that fit any training loop; the training system around
them starts at `simpro-fast train`, or with `train` from Python. `load_model` takes what it has
trained; `register_dataset` and `register_model` add data sets and networks of your own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpro_fast.answers.model import load_model
    from simpro_fast.data.datasets.base import ArrayDataset
    from simpro_fast.data.datasets.registry import register_dataset
    from simpro_fast.methods import FixMatch, SimPro
    from simpro_fast.models import register_model
    from simpro_fast.training.in_process import train

__version__ = "0.1.0"
__all__ = [
    "ArrayDataset",
    "FixMatch",
    "SimPro",
    "__version__",
    "load_model",
    "register_dataset",
    "register_model",
    "train",
]

_PLACES = {
    "ArrayDataset": "simpro_fast.data.datasets.base",
    "FixMatch": "simpro_fast.methods",
    "SimPro": "simpro_fast.methods",
    "load_model": "simpro_fast.answers.model",
    "register_dataset": "simpro_fast.data.datasets.registry",
    "register_model": "simpro_fast.models",
    "train": "simpro_fast.training.in_process",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that reading a configuration or printing help does not pay for importing torch.
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'simpro_fast' has no attribute '{name}'")
