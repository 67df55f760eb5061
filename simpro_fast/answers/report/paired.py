"""Experiments against the first of them: differences paired by split, with standard errors.

Each split gives one difference, of the means over its seeds: both sides have the same labels, and
the spread of these differences says how far other labels would move them. Nothing is adjusted for
several comparisons: every line can be checked by hand, and does not depend on what else is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from simpro_fast.answers.report.groups import Group
from simpro_fast.answers.report.runs import Run


@dataclass(frozen=True)
class _Number:
    title: str
    unit: str
    digits: int
    higher_is_better: bool


NUMBERS = {
    "top1": _Number("Accuracy", "points", 1, True),
    "top1_class_mean": _Number("Mean accuracy of the classes", "points", 1, True),
    "kl_pi_u": _Number("KL", "nats", 3, False),
}
"""Keys of summary.json that are compared."""
_LEAST_ERROR = 1e-9
"""Below it differences are equal but for rounding, and have shown no spread to judge them by."""
NOT_ADJUSTED = (
    "Nothing is adjusted for several comparisons: of twenty experiments that are as good as the "
    "first, about one is called ahead or behind."
)


@dataclass(frozen=True)
class Difference:
    """One experiment minus another, in one number."""

    label: str
    other: str
    key: str
    """Of `NUMBERS`."""
    values: tuple[float, ...]
    """Of each split; at least one."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def error(self) -> float | None:
        """Standard error of the mean over splits; None for one split."""
        splits = len(self.values)
        return float(np.std(self.values, ddof=1)) / splits**0.5 if splits > 1 else None

    @property
    def clear(self) -> bool:
        """Whether 0 lies outside the 95 % t interval."""
        if self.error is None or self.error < _LEAST_ERROR:
            return False
        return abs(self.mean) > float(stdtrit(len(self.values) - 1, 0.975)) * self.error

    @property
    def verdict(self) -> str:
        """`ahead`, `behind`, `not distinguishable`; of one split, that nothing can be said."""
        if self.error is None:
            return "one split, which says nothing about other labels"
        if not self.clear:
            return "not distinguishable"
        return "ahead" if (self.mean > 0) == NUMBERS[self.key].higher_is_better else "behind"

    def number(self, value: float | None, sign: str = "") -> str:
        """A value in the decimal places of the key, `-` for None."""
        return "-" if value is None else f"{value:{sign},.{NUMBERS[self.key].digits}f}"

    @property
    def sentence(self) -> str:
        """Verdict with its numbers."""
        what, unit, n = NUMBERS[self.key].title, NUMBERS[self.key].unit, len(self.values)
        signed = f"{self.number(self.mean, '+')} {unit}"
        error = f"(standard error {self.number(self.error)}, {n} splits)"
        if self.error is None:
            return f"{what}: {self.label} minus {self.other} is {signed} on {self.verdict}."
        if not self.clear:
            return f"{what}: {self.label} and {self.other} are {self.verdict}, {signed} {error}."
        who = f"{self.label} is {'ahead of' if self.verdict == 'ahead' else 'behind'} {self.other}"
        return f"{what}: {who} by {self.number(abs(self.mean))} {unit} {error}."


def compare(groups: Sequence[Group]) -> list[Difference]:
    """Differences of every later group to the first one, in all numbers that both have.

    Only finished runs count, and only splits that both have. The mean of the classes is left out
    where it differs as the accuracy does, as on a balanced test set.
    """
    found = []
    for group in groups[1:]:
        of_accuracy: tuple[float, ...] = ()
        for key in NUMBERS:
            ours, theirs = _by_split(group, key), _by_split(groups[0], key)
            values = tuple(ours[split] - theirs[split] for split in ours if split in theirs)
            if key == "top1":
                of_accuracy = values
            balanced = len(values) == len(of_accuracy) and np.allclose(values, of_accuracy)
            if values and not (key == "top1_class_mean" and balanced):
                found.append(Difference(group.label, groups[0].label, key, values))
    return found


def not_adjusted(found: Sequence[Difference]) -> str:
    """What must be said beside several verdicts; empty for one, or for none (a single split)."""
    judged = {one.label for one in found if one.error is not None}
    return NOT_ADJUSTED if len(judged) > 1 else ""


def left_out(groups: Sequence[Group]) -> list[str]:
    """Splits that do not count in a difference, since only one side has a finished run of them."""
    notes = []
    for group in groups[1:]:
        sides = (groups[0], group)
        splits = [{run.split_id: run for run in side.runs if not run.state} for side in sides]
        if not splits[0].keys() & splits[1].keys():
            notes.append(
                f"{group.label} and {groups[0].label}: no split (the same images and labels) is "
                "finished in both, so no paired difference is given"
            )
            continue
        for (here, there), (side, other) in zip(
            (splits, splits[::-1]), (sides, sides[::-1]), strict=True
        ):
            alone = [_split_title(run) for split, run in here.items() if split not in there]
            if alone:
                notes.append(
                    f"{', '.join(alone)}: finished in {side.label} and not in {other.label}, so "
                    "left out of their difference"
                )
    return notes


def _split_title(run: Run) -> str:
    return run.repetition if run.split_seed is None else f"split seed {run.split_seed}"


def _by_split(group: Group, key: str) -> dict[str, float]:
    """Mean of a number over the finished runs of each split."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        if not run.state and run.summary.get(key) is not None:
            found.setdefault(run.split_id, []).append(float(run.summary[key]))
    return {split: float(np.mean(values)) for split, values in found.items()}
