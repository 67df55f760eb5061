"""Runs beside each other: repetitions of one experiment are one group, on splits that all share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpro_fast.answers.report.runs import METHOD_TITLES, Run, without_split_seed
from simpro_fast.utils.errors import UserError

_CURE = "--force shows them beside each other all the same"
_NOT_TOLD = (
    *("threads", "data_threads", "prefetch", "resident", "profile", "cache_dir", "impl"),
    "split_seed",
)
"""Keys in which repetitions may differ: of speed, which change nothing that is learned, and that
which draws the split."""


@dataclass(frozen=True)
class Group:
    """The repetitions of one experiment: seeds, split seeds, or both.

    What spreads is the standard error over splits where there are several, each the mean of its
    seeds; of one split it is the standard deviation over seeds, which leaves out the luck of which
    images were labeled.
    """

    label: str
    """Short, and different from those of the other groups."""
    runs: tuple[Run, ...]
    """In the order of their split seeds and seeds; at least one."""

    @property
    def summary(self) -> dict[str, Any]:
        """Return the summary of the first run, for what all runs share."""
        return self.runs[0].summary

    @property
    def name(self) -> str:
        """Name of the run, or what the names of several have in common."""
        run = self.runs[0]
        return run.experiment if len(self.runs) > 1 else str(run.summary["name"])

    @property
    def splits(self) -> list[str]:
        """Every split once."""
        return list(dict.fromkeys(run.split_id for run in self.runs))

    @property
    def repetitions(self) -> str:
        """Repetitions in words: `5 splits`, `3 seeds`, `1 run`."""
        if len(self.runs) == 1:
            return "1 run"
        return f"{len(self.splits)} splits" if len(self.splits) > 1 else f"{len(self.runs)} seeds"

    @property
    def spread_key(self) -> str:
        """What spreads, in a word."""
        return "standard_error" if len(self.splits) > 1 else "std"

    @property
    def class_order(self) -> np.ndarray:
        """Classes by labeled images, the most first; equal ones as they come. int64 [K]."""
        counts = self.summary.get("labeled_counts") or [0] * len(self.summary["class_names"])
        return np.argsort(-np.asarray(counts, dtype=np.float64), kind="stable")

    def number(self, key: str) -> tuple[float | None, float | None]:
        """Mean of a number of the summaries, and what it spreads (None for one repetition)."""
        values = np.array([run.summary.get(key) for run in self.runs], dtype=np.float64)
        mean, spread = (float(value) for value in self._mean_and_spread(values))
        return (mean if math.isfinite(mean) else None), (spread if math.isfinite(spread) else None)

    def vector(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """The same of a list per class: [K] each, NaN where a class has no value or one."""
        num_classes = len(self.summary["class_names"])
        empty: list[None] = [None] * num_classes
        lists = [run.summary.get(key) or empty for run in self.runs]
        return self._mean_and_spread(np.array(lists, dtype=np.float64))

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps, and mean and spread over the runs that have the metric there."""
        found = [run.series(key) for run in self.runs]
        steps = np.unique(np.concatenate([steps for steps, _ in found]))
        width = max((values.shape[1:] for _, values in found), default=())
        table = np.full((len(found), len(steps), *width), np.nan)
        for row, (at, values) in zip(table, found, strict=True):
            if len(at):
                row[np.searchsorted(steps, at)] = values
        return steps, *self._mean_and_spread(table)

    def _mean_and_spread(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and spread over the first axis, one entry for each run."""
        splits = self.splits
        if len(splits) == 1:
            return mean_and_deviation(table)
        of_run = np.array([splits.index(run.split_id) for run in self.runs])
        means = np.stack([mean_and_deviation(table[of_run == i])[0] for i in range(len(splits))])
        mean, deviation = mean_and_deviation(means)
        return mean, deviation / np.sqrt(np.maximum(1, np.isfinite(means).sum(axis=0)))


def spread_titles(groups: Sequence[Group]) -> str:
    """Words for what follows a \u00b1 beside these groups; empty where nothing does."""
    titles = {
        True: "standard error over splits",
        False: "standard deviation over seeds of one split",
    }
    found = {len(group.splits) > 1 for group in groups if len(group.runs) > 1}
    return ", or ".join(title for several, title in titles.items() if several in found)


def labeled_columns(groups: Sequence[Group]) -> dict[str, list[int] | None]:
    """Labeled images per class by the head of their column; one a group where they differ."""
    counts = {f"{g.label}: labeled": g.summary.get("labeled_counts") for g in groups}
    first, *others = counts.values()
    return counts if any(one != first for one in others) else {"labeled": first}


def mean_and_deviation(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over the first axis, without NaN: mean, and standard deviation (NaN for fewer than two)."""
    known = np.isfinite(table)
    count = known.sum(axis=0)
    filled = np.where(known, table, 0.0)
    mean = np.divide(filled.sum(axis=0), count, out=np.full(count.shape, np.nan), where=count > 0)
    squares = np.where(known, (table - mean) ** 2, 0.0).sum(axis=0)
    variance = np.divide(squares, count - 1, out=np.full(count.shape, np.nan), where=count > 1)
    return mean, np.sqrt(variance)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of one name and method are one group, whatever their seed and split seed.

    Where a seed of a split occurs twice, each folder makes a group of its own.
    """
    parts: dict[Any, list[Run]] = {}
    for run in runs:
        parts.setdefault((run.experiment, run.summary["method"]), []).append(run)
    for key, members in list(parts.items()):
        if _repeats(members):
            del parts[key]
            for run in members:
                place = without_split_seed(str(run.path.resolve().parent))
                parts.setdefault((*key, place), []).append(run)
    groups: list[list[Run]] = []
    for members in parts.values():
        if _repeats(members):
            groups += [[run] for run in members]
        else:
            groups.append(sorted(members, key=_place_in_group))
    order = {id(run): place for place, run in enumerate(runs)}
    groups.sort(key=lambda members: min(order[id(run)] for run in members))
    labels = run_labels([members[0] for members in groups])
    return [Group(label, tuple(m)) for label, m in zip(labels, groups, strict=True)]


def _repeats(runs: Sequence[Run]) -> bool:
    return len({run.repetition for run in runs}) < len(runs)


def _place_in_group(run: Run) -> tuple[int, str]:
    split = -1 if run.split_seed is None else run.split_seed
    return split, str(run.summary["seed"]).zfill(20)


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Short names that tell groups apart, by their first runs: methods, else names, else places."""

    names = [run.experiment for run in runs]
    shared = os.path.commonpath(names) if len(set(names)) > 1 and all(names) else ""

    def method(run: Run) -> str:
        return METHOD_TITLES.get(run.summary["method"], str(run.summary["method"]))

    ways: tuple[Callable[[Run], str], ...] = (
        method,
        lambda run: run.experiment.removeprefix(shared).strip("/"),
        lambda run: f"{run.experiment}, {method(run)}",
        lambda run: f"{run.experiment} {run.repetition}",
    )
    for describe in ways:
        labels = [describe(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({number})" for number, label in enumerate(labels, start=1)]


def check_same_split(groups: Sequence[Group], *, force: bool = False) -> list[str]:
    """Whether accuracies and estimates of these experiments may be compared.

    A seed and a split seed draw which images are labeled, so runs that differ in them may differ in
    that; but every experiment needs a split that the first one has too.

    Args:
        force: other splits are told and not refused.

    Returns:
        what must be said beside the comparison.

    Raises:
        UserError: the classes differ, which nothing is drawn of, or the splits do.
    """
    runs = [run for group in groups for run in group.runs]
    first, notes = runs[0], []

    for run in runs[1:]:
        if run.summary["class_names"] != first.summary["class_names"]:
            raise UserError(f"{run.path} has other classes than {first.path}; report each alone")
        twin = next(r for r in runs if r is run or r.repetition == run.repetition)
        for other in (first, twin):
            if differing := _differences(other, run):
                said = f"{run.path} has another split than {other.path}: {'; '.join(differing)}"
                if not force:
                    raise UserError(f"{said}; {_CURE}")
                notes.append(said)
                break
    for group in groups[1:]:
        here, there = ({*g.splits} - {""} for g in (group, groups[0]))
        if not force and here and there and not here & there:
            raise UserError(
                f"{group.runs[0].path} and its repetitions share no split with {first.path}; "
                f"{_CURE}"
            )
    return notes


def _differences(a: Run, b: Run) -> list[str]:
    """Describe what makes the splits of two runs incomparable; empty where they fit."""
    found = []
    data = [run.environment.get("data") for run in (a, b)]
    if None not in data and data[0] != data[1]:
        found.append("other images or labels")
    for kind in ("labeled", "unlabeled", "test"):
        if kind == "labeled" and a.split_seed != b.split_seed:
            continue  # of own images, copies of those held out are left out
        key = f"{kind}_counts"
        old, new = (run.split.get(key) or run.summary.get(key) for run in (a, b))
        if old and new and old != new:
            found.append(f"{sum(new):,} {kind} images instead of {sum(old):,}")
    ids = [run.split_id for run in (a, b)]
    if a.repetition == b.repetition and all(ids) and ids[0] != ids[1] and not found:
        found.append("the same seed chose other images")
    return found


def seeds_that_differ(group: Group) -> str | None:
    """Keys besides the seeds in which the runs of a group differ: then a spread is no spread."""
    found = []
    for section in ("method", "data", "model", "optim", "train"):
        parts = [run.config.get(section, {}) for run in group.runs if run.config]
        for key in dict.fromkeys(key for part in parts for key in part):
            values = [part.get(key) for part in parts]
            if key not in _NOT_TOLD and any(value != values[0] for value in values):
                shown = ", ".join(dict.fromkeys(str(value) for value in values))
                found.append(f"{section}.{key} ({shown})")
    if not found:
        return None
    return f"the seeds of {group.label} differ in more than the seed: {', '.join(found[:4])}"
