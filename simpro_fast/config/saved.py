"""Configurations that runs have left, in `config.yaml` and in checkpoints.

Others may have written them, so nothing that they name is imported or read; only the configuration
of the command at hand may name code and other files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpro_fast.config.load import known_keys, parse_config, read_one_file
from simpro_fast.config.schema import Config
from simpro_fast.utils.errors import ConfigError


def read_saved_tree(path: Path) -> dict[str, Any]:
    """The keys of a run's `config.yaml` as they stand there; sections are dictionaries.

    Raises:
        ConfigError: the file is missing or malformed, or has a `base`; names it.
    """
    tree = read_one_file(path)
    if "base" in tree:
        raise ConfigError(f"{path}: a run's configuration is whole and has no `base`")
    for key, inner in known_keys().items():
        if inner is not None and not isinstance(tree.get(key, {}), dict):
            raise ConfigError(f"{path}: '{key}' is a section; it holds keys")
    return tree


def read_saved_config(path: Path) -> Config:
    """The configuration in a run's `config.yaml`.

    Raises:
        ConfigError: the file is missing, malformed or of a version with other keys; names it.
    """
    tree = read_saved_tree(path)
    try:
        return saved_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def saved_config(tree: dict[str, Any]) -> Config:
    """The configuration in `tree`; a method that this process does not know has its keys as read.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    return parse_config(tree, may_import=False)
