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

from simpro_fast.config import Config, flatten, load_config
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


def published_for(config: Config) -> Published | None:
    """The number published for a run that trains as `config` does, whatever its seed; else None.

    Paths, names and what merely rounds differently do not matter.
    """
    if config.model.weights is not None:
        return None
    return _by_training().get(_training(config))


@cache
def _by_training() -> dict[tuple[tuple[str, Any], ...], Published]:
    found: dict[tuple[tuple[str, Any], ...], Published] = {}
    for row in read_published():
        if row["config"]:
            config = load_config(row["config"], row["overrides"].split())
            std = float(row["std"]) if row["std"] else None
            number = Published(row["metric"], float(row["mean"]), std, row["method"], row["source"])
            found.setdefault(_training(config), number)
    return found


def _training(config: Config) -> tuple[tuple[str, Any], ...]:
    changes = type(config).changes()
    kept = ((k, v) for k, v in flatten(config).items() if changes[k] in ("training", "length"))
    return tuple((k, repr(v)) for k, v in kept if k != "seed")
