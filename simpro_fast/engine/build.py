"""The one function that builds an engine."""

from __future__ import annotations

from torch import nn

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.engine.base import Engine
from simpro_fast.engine.plain import PlainEngine


def build_engine(config: Config, model: nn.Module, ranks: Ranks) -> Engine:
    """The engine that `distributed.engine` names. Moves the model to the ranks' device.

    Raises:
        UserError: DeepSpeed is asked for and not installed.
    """
    if config.distributed.engine == "plain":
        return PlainEngine(config, model, ranks)
    from simpro_fast.engine.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, model, ranks)
