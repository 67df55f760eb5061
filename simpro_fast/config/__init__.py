"""Typed, strict configuration."""

from simpro_fast.config.find import find_config
from simpro_fast.config.load import dump_config, flatten, load_config, parse_config
from simpro_fast.config.methods import MethodConfig
from simpro_fast.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
)

__all__ = [
    "Config",
    "DataConfig",
    "MethodConfig",
    "ModelConfig",
    "OptimConfig",
    "dump_config",
    "find_config",
    "flatten",
    "load_config",
    "parse_config",
]
