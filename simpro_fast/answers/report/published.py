"""Published numbers, and which of our runs they may stand beside: those of the same configuration.

`configs/published.csv` holds them with their source. A row with a `config` is what that shipped
configuration with these `overrides` would repeat, as nearly as can be said with them; why others
have none stands in configs/README.md. Of several rows with one configuration the first counts.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from typing import Any

from simpro_fast.config import flatten, load_config
from simpro_fast.config.explain import flat_items
from simpro_fast.config.find import shipped_configs

NAME = "published.csv"


@dataclass(frozen=True)
class Published:
    """A published number; accuracies in percent."""

    metric: str
    mean: float
    std: float | None
    method: str
    source: str


def read_published() -> list[dict[str, str]]:
    """All rows of the file."""
    with (shipped_configs() / NAME).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published_for(config: dict[str, Any]) -> Published | None:
    """The number published for a run that trains as `config` says, whatever its seed; else None.

    Paths, names and what merely rounds differently do not matter.

    Args:
        config: contents of a run's config.yaml. Nothing that it names is imported.
    """
    said = dict(flat_items(config, ""))
    if said.get("model.weights") is not None:
        return None
    for training, number in _by_training():
        if all(key in said and said[key] == value for key, value in training.items()):
            return number
    return None


@cache
def _by_training() -> list[tuple[dict[str, Any], Published]]:
    """Map each published number's training: keys that change a training, but the seed."""
    found: list[tuple[dict[str, Any], Published]] = []
    for row in read_published():
        if row["config"]:
            config = load_config(row["config"], row["overrides"].split())
            std = float(row["std"]) if row["std"] else None
            number = Published(row["metric"], float(row["mean"]), std, row["method"], row["source"])
            changes = type(config).changes()
            training = {
                key: value
                for key, value in flatten(config).items()
                if changes[key] in ("training", "length") and key != "seed"
            }
            found.append((training, number))
    return found
