"""Networks and their weight averages."""

from simpro_fast.models.build import build_model, list_models
from simpro_fast.models.ema import WeightEMA

__all__ = ["WeightEMA", "build_model", "list_models"]
