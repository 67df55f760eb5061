"""Configurations that runs have left, in `config.yaml` and in checkpoints.

Others may have written them, so nothing that they name is imported; only the configuration of the
command at hand may name code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpro_fast.config.load import known_keys, parse_config, read_tree
from simpro_fast.config.schema import Config
from simpro_fast.errors import ConfigError


def read_saved_tree(path: Path) -> dict[str, Any]:
    """The keys of a run's `config.yaml` as they stand there; sections are dictionaries.

    Raises:
        ConfigError: the file is missing or malformed; names it.
    """
    tree = read_tree(path)
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
    """The configuration in `tree`, with keys of earlier versions as they are called now.

    A method that this process does not know has its keys as they are read.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    tree = {k: dict(v) if isinstance(v, dict) else v for k, v in tree.items()}
    data, method = tree.get("data"), tree.get("method")
    if isinstance(data, dict):
        data.pop("steps_per_fetch", None)  # meant nothing for the training
    if isinstance(method, dict) and "recipe" in method:
        _split_method_keys(method)
    return parse_config(tree, may_import=False)


def _split_method_keys(method: dict[str, Any]) -> None:
    """A method section of before methods had keys of their own, where some meant nothing."""
    method["variant"] = method.pop("recipe")
    if method.get("hard") is None:
        method.pop("hard", None)
    if method.get("name") == "fixmatch":
        for key in ("tau", "adjust_pseudo_labels", "adjust_loss"):
            method.pop(key, None)
