"""Networks, their weight averages, and batch norm over ranks."""

from simpro_fast.models.batch_norm import average_buffers, convert_sync_batch_norm
from simpro_fast.models.build import build_model, list_models
from simpro_fast.models.ema import WeightEMA

__all__ = [
    "WeightEMA",
    "average_buffers",
    "build_model",
    "convert_sync_batch_norm",
    "list_models",
]
