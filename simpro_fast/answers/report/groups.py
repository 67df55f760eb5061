"""Runs beside each other: seeds of one experiment are one group, and all share one split."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpro_fast.answers.report.runs import METHOD_TITLES, Run
from simpro_fast.utils.errors import UserError

_CURE = "--force shows them beside each other all the same"
_SPEED = ("threads", "data_threads", "prefetch", "resident", "profile", "cache_dir", "impl")
"""Keys that change how fast a run is and not what it learns."""


@dataclass(frozen=True)
class Group:
    """The seeds of one experiment."""

    label: str
    """Short, and different from those of the other groups."""
    runs: tuple[Run, ...]
    """In the order of their seeds; at least one."""

    @property
    def summary(self) -> dict[str, Any]:
        """Return the summary of the first seed, for what all seeds share."""
        return self.runs[0].summary

    @property
    def class_order(self) -> np.ndarray:
        """Classes by labeled images, the most first; equal ones as they come. int64 [K]."""
        counts = self.summary.get("labeled_counts") or [0] * len(self.summary["class_names"])
        return np.argsort(-np.asarray(counts, dtype=np.float64), kind="stable")

    def number(self, key: str) -> tuple[float | None, float | None]:
        """Mean of a number of the summaries, and its standard deviation (None for one seed)."""
        values = [v for run in self.runs if (v := run.summary.get(key)) is not None]
        if not values:
            return None, None
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return float(np.mean(values)), spread

    def vector(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """The same of a list per class: [K] each, NaN where a class has no value or one seed."""
        num_classes = len(self.summary["class_names"])
        empty: list[None] = [None] * num_classes
        lists = [run.summary.get(key) or empty for run in self.runs]
        return mean_and_spread(np.array(lists, dtype=np.float64))

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps, and mean and standard deviation over the seeds that have the metric there."""
        found = [run.series(key) for run in self.runs]
        steps = np.unique(np.concatenate([steps for steps, _ in found]))
        width = max((values.shape[1:] for _, values in found), default=())
        table = np.full((len(found), len(steps), *width), np.nan)
        for row, (at, values) in zip(table, found, strict=True):
            if len(at):
                row[np.searchsorted(steps, at)] = values
        return steps, *mean_and_spread(table)


def mean_and_spread(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over the first axis, without NaN: mean, and standard deviation (NaN for fewer than two)."""
    known = np.isfinite(table)
    count = known.sum(axis=0)
    filled = np.where(known, table, 0.0)
    mean = np.divide(filled.sum(axis=0), count, out=np.full(count.shape, np.nan), where=count > 0)
    squares = np.where(known, (table - mean) ** 2, 0.0).sum(axis=0)
    variance = np.divide(squares, count - 1, out=np.full(count.shape, np.nan), where=count > 1)
    return mean, np.sqrt(variance)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of one name and method are seeds of one group; two of one seed lie in two groups."""
    parts: dict[Any, list[Run]] = {}
    for run in runs:
        parts.setdefault((run.summary["name"], run.summary["method"]), []).append(run)
    for key, members in list(parts.items()):
        if max(Counter(run.summary["seed"] for run in members).values()) > 1:
            del parts[key]
            for run in members:
                parts.setdefault((*key, run.path.resolve().parent), []).append(run)
    groups: list[list[Run]] = []
    for members in parts.values():
        seeds = [run.summary["seed"] for run in members]
        if len(set(seeds)) == len(seeds):
            groups.append(sorted(members, key=lambda run: str(run.summary["seed"]).zfill(20)))
        else:
            groups += [[run] for run in members]
    order = {id(run): place for place, run in enumerate(runs)}
    groups.sort(key=lambda members: min(order[id(run)] for run in members))
    labels = run_labels([members[0] for members in groups])
    return [Group(label, tuple(m)) for label, m in zip(labels, groups, strict=True)]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Short names that tell groups apart, by their first runs: methods, else names, else places."""

    names = [str(run.summary["name"]) for run in runs]
    shared = os.path.commonpath(names) if len(set(names)) > 1 and all(names) else ""

    def method(run: Run) -> str:
        return METHOD_TITLES.get(run.summary["method"], str(run.summary["method"]))

    ways: tuple[Callable[[Run], str], ...] = (
        method,
        lambda run: str(run.summary["name"]).removeprefix(shared).strip("/"),
        lambda run: f"{run.summary['name']}, {method(run)}",
        lambda run: f"{run.summary['name']} seed {run.summary['seed']}",
    )
    for describe in ways:
        labels = [describe(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def check_same_split(runs: Sequence[Run], *, force: bool = False) -> list[str]:
    """Whether accuracies and estimates of these runs may be compared.

    The seed draws which images are labeled, so splits of different seeds may differ in that.

    Args:
        force: other splits are told and not refused.

    Returns:
        what must be said beside the comparison.

    Raises:
        UserError: the classes differ, which nothing is drawn of, or the splits do.
    """
    first, notes = runs[0], []
    for run in runs[1:]:
        if run.summary["class_names"] != first.summary["class_names"]:
            raise UserError(f"{run.path} has other classes than {first.path}; report each alone")
        twin = next(r for r in runs if r is run or r.summary["seed"] == run.summary["seed"])
        for other in dict.fromkeys((first.path, twin.path)):
            differing = _differences(first if other == first.path else twin, run)
            if not differing:
                continue
            said = f"{run.path} has another split than {other}: {'; '.join(differing)}"
            if not force:
                raise UserError(f"{said}; {_CURE}")
            notes.append(said)
            break
    return notes


def _differences(a: Run, b: Run) -> list[str]:
    """Describe what makes the splits of two runs incomparable; empty where they fit."""
    found = []
    data = [run.environment.get("data") for run in (a, b)]
    if None not in data and data[0] != data[1]:
        found.append("other images or labels")
    for kind in ("labeled", "unlabeled", "test"):
        key = f"{kind}_counts"
        old, new = (run.split.get(key) or run.summary.get(key) for run in (a, b))
        if old and new and old != new:
            found.append(f"{sum(new):,} {kind} images instead of {sum(old):,}")
    ids = [str(run.split.get("hash") or run.environment.get("split") or "") for run in (a, b)]
    same_seed = a.summary["seed"] == b.summary["seed"]
    if same_seed and all(ids) and ids[0] != ids[1] and not found:
        found.append("the same seed chose other images")
    return found


def seeds_that_differ(group: Group) -> str | None:
    """Keys besides the seed in which the runs of a group differ: then a spread is no spread."""
    found = []
    for section in ("method", "data", "model", "optim", "train"):
        parts = [run.config.get(section, {}) for run in group.runs if run.config]
        for key in dict.fromkeys(key for part in parts for key in part):
            values = [part.get(key) for part in parts]
            if key not in _SPEED and any(value != values[0] for value in values):
                shown = ", ".join(dict.fromkeys(str(value) for value in values))
                found.append(f"{section}.{key} ({shown})")
    if not found:
        return None
    return f"the seeds of {group.label} differ in more than the seed: {', '.join(found[:4])}"
