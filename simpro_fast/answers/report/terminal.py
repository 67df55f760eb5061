"""Reports on runs, as tables for the terminal."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Group as Parts
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from simpro_fast.answers.report.findings import Interval, finding, intervals, shared_warnings
from simpro_fast.answers.report.groups import Group, labeled_columns, spread_titles
from simpro_fast.answers.report.paired import NUMBERS, Difference, compare, not_adjusted
from simpro_fast.answers.report.runs import METHOD_TITLES, Run, kl_of_uniform
from simpro_fast.utils.atomic_write import finite
from simpro_fast.utils.printable import printable, printables
from simpro_fast.utils.terminal import plain_table, rendered

_MAX_ROWS = 20
_MAX_NAME = 18
_MIN_BAR, _MAX_BAR = 8, 40
_INTERVAL = 22
"""Columns of an estimate with its interval."""
_BESIDE = 3
"""Experiments that stand beside each other, class by class; more have one line each."""
LABELS_ALONE = ("probe_class_mean", "neighbour_class_mean")
"""What the labeled images alone give: of runs on cached features (training/labels_alone)."""
ACCURACIES = {
    "overall": "top1",
    "mean of the classes": "top1_class_mean",
    "logistic regression on the labels": LABELS_ALONE[0],
    "nearest labeled image": LABELS_ALONE[1],
    "many (> 100 labeled)": "many",
    "medium (20 to 100)": "medium",
    "few (< 20)": "few",
    "mean of the last 20 evaluations": "top1_mean_last20",
    "best evaluation": "top1_best",
}


def print_summary(summary: dict[str, Any], *, file: TextIO | None = None) -> None:
    """Print what one finished run learned, see `print_report`.

    Args:
        summary: the contents of `summary.json`.
        file: where to print; default `sys.stdout`.
    """
    run = Run(Path(), printables(summary), [])
    label = METHOD_TITLES.get(run.summary["method"], run.summary["method"])
    print_report([Group(label, (run,))], file=file)


def print_report(
    groups: Sequence[Group], notes: Sequence[str] = (), *, file: TextIO | None = None
) -> None:
    """Print accuracies, the estimated class distribution of the unlabeled set, and the findings.

    Up to 3 experiments stand beside each other, class by class: more than 20 classes in groups of
    neighbours (accuracies averaged, images and shares summed). Of several runs the mean is shown,
    and what it spreads (`Group`); later experiments are compared with the first one, split by
    split. Without a terminal the text has no escape codes.

    Args:
        notes: what must be said before it.
        file: where to print; default `sys.stdout`.
    """
    out = sys.stdout if file is None else file
    width = shutil.get_terminal_size((100, 24)).columns
    block, mark = glyphs(out)
    parts: list[RenderableType] = [Text(f"note: {printable(note)}") for note in notes]
    spread = [f"  \u00b1 {title}"] if (title := spread_titles(groups)) else []
    if len(groups) > _BESIDE:
        parts += [_experiments_table(groups), *spread, ""]
        unfinished = [run for group in groups for run in group.runs if run.state]
        parts += [*map(heading, unfinished), *([""] if unfinished else [])]
        parts += _comparison(groups, ["top1"])
    else:
        parts += [
            *(line for group in groups for line in _headings(group)),
            "",
            _accuracy_table(groups),
            *spread,
            "",
            *_comparison(groups),
            _class_table(groups),
            "",
            _distribution_table(groups, width, block, mark),
        ]
        if truth := groups[0].summary.get("pi_u_true"):
            values = ", ".join(
                f"{group.label} {spread_text(group.number('kl_pi_u'), 3)}" for group in groups
            )
            parts.append(
                f"  {block} pi_u, {mark} truth; KL(true || pi_u) in nats: {values} "
                f"(a uniform guess: {kl_of_uniform(truth):.3f})"
            )
        parts.append("")
    parts += map(Text, finding_lines(groups))
    text = rendered(Parts(*parts), out, width)
    print(text if block == "\u2588" else text.replace("\u00b1", "+-"), file=out)


def report_data(groups: Sequence[Group], notes: Sequence[str]) -> dict[str, Any]:
    """Return what `print_report` shows, for programs; accuracies in percent, shares from 0 to 1."""

    def number(group: Group, key: str) -> dict[str, float | None]:
        mean, spread = group.number(key)
        return {"mean": mean, "std": None, "standard_error": None, group.spread_key: spread}

    def vector(group: Group, key: str) -> dict[str, list[float | None]]:
        mean, spread = group.vector(key)
        unknown = [math.nan] * len(mean)
        found = {"mean": mean.tolist(), "std": unknown, "standard_error": unknown}
        return finite(found | {group.spread_key: spread.tolist()})

    numbers = (*ACCURACIES.values(), "kl_pi_u", "images_per_second")
    return {
        "notes": list(notes),
        "class_names": groups[0].summary["class_names"],
        "labeled_counts": groups[0].summary.get("labeled_counts"),
        "pi_u_true": groups[0].summary.get("pi_u_true"),
        "experiments": [
            {
                "label": group.label,
                "name": group.name,
                "method": group.summary["method"],
                "runs": [
                    {
                        "path": str(run.path),
                        "seed": run.summary["seed"],
                        "split_seed": run.split_seed,
                        "state": run.state or "finished",
                        "steps": run.summary["steps"],
                    }
                    for run in group.runs
                ],
                **{key: number(group, key) for key in numbers},
                **{key: vector(group, key) for key in ("per_class", "pi_u")},
                "finding": found.sentence if (found := finding(group.summary)) else None,
                "warnings": list(found.warnings) if found else [],
            }
            for group in groups
        ],
        "differences": [_difference(one) for one in compare(groups)],
    }


def _difference(found: Difference) -> dict[str, Any]:
    return {
        "experiment": found.label,
        "minus": found.other,
        "number": found.key,
        "splits": len(found.values),
        "mean": found.mean,
        "standard_error": found.error,
        "verdict": found.verdict,
    }


def heading(run: Run) -> Text:
    """One run in a line."""
    summary = run.summary
    method = METHOD_TITLES.get(summary["method"], summary["method"])
    speed = summary.get("images_per_second")
    rate = f", {speed:,.0f} views/s" if speed is not None else ""
    seconds = summary.get("seconds")
    time = f" in {duration(seconds)}" if seconds is not None else ""
    title = (f"{summary['name']}: {method}", "bold")
    progress = run.state or f"{summary['steps']:,} steps{time}{rate}"
    return Text.assemble(title, f", {run.repetition}, {progress}")


def _headings(group: Group) -> list[Text]:
    """The run in a line, or all of them, and those that are not finished."""
    if len(group.runs) == 1:
        return [heading(group.runs[0])]
    method = METHOD_TITLES.get(group.summary["method"], group.summary["method"])
    title = (f"{group.name}: {method}", "bold")
    several = Text.assemble(title, f", {group.repetitions}, {group.summary['steps']:,} steps")
    return [several, *(heading(run) for run in group.runs if run.state)]


def finding_lines(groups: Sequence[Group]) -> list[str]:
    """Write every group's finding, of its first run; a warning of all comes last, once."""
    findings = [finding(group.summary) for group in groups]
    shared, lines = shared_warnings(findings), []
    for group, found in zip(groups, findings, strict=True):
        if found is None:
            continue
        which = f", {group.runs[0].repetition}" if len(group.runs) > 1 else ""
        who = f"{group.label}{which}: " if len(groups) > 1 or which else ""
        lines.append(f"{who}{found.sentence}")
        lines += [f"warning: {text}" for text in found.warnings if text not in shared]
    return lines + [f"warning, of all: {text}" for text in shared]


def _accuracy_table(groups: Sequence[Group]) -> Table:
    table = plain_table("test accuracy, %", *(group.label for group in groups))
    for title, key in ACCURACIES.items():
        if key in LABELS_ALONE and not any(key in group.summary for group in groups):
            continue
        table.add_row(f"  {title}", *(spread_text(group.number(key), 1) for group in groups))
    return table


def _comparison(groups: Sequence[Group], keys: Sequence[str] = tuple(NUMBERS)) -> list[str]:
    """Lines on the differences to the first experiment."""
    found = compare(groups)
    lines = [one.sentence for one in found if one.key in keys]
    return [*lines, *filter(None, [not_adjusted(found)]), ""] if lines else []


def _experiments_table(groups: Sequence[Group]) -> Table:
    """One line per experiment, in the order given: a mean of few runs is no rank."""
    keys = {"overall": ("top1", 1), "few": ("few", 1), "KL": ("kl_pi_u", 3)}
    table = plain_table("experiment", "runs", *keys)
    for group in groups:
        values = (spread_text(group.number(key), digits) for key, digits in keys.values())
        table.add_row(group.label, group.repetitions, *values)
    return table


def _class_table(groups: Sequence[Group]) -> Table:
    """Accuracy of each class, or of each group of neighbours, beside its labeled images."""
    summary = groups[0].summary
    labeled = labeled_columns(groups)
    table = plain_table("test accuracy, %", *labeled, *(group.label for group in groups))
    means = [group.vector("per_class") for group in groups]
    for title, classes in _rows(summary):
        values = []
        for mean, spread in means:
            known = [float(mean[k]) for k in classes if math.isfinite(mean[k])]
            alone = float(spread[classes[0]]) if len(classes) == 1 else math.nan
            middle = sum(known) / len(known) if known else None
            values.append(spread_text((middle, alone if math.isfinite(alone) else None), 1))
        images = (_total(counts, classes) for counts in labeled.values())
        table.add_row(title, *images, *values)
    return table


def _distribution_table(groups: Sequence[Group], width: int, block: str, mark: str) -> Table:
    """Shares of the classes in the unlabeled set: the truth, and every pi_u as a bar.

    Of a single run the estimate with its intervals, where there is one, comes before pi_u.
    """
    first = groups[0].summary
    rows = _rows(first)
    images = [_total(first.get("unlabeled_counts"), classes) for _, classes in rows]
    true = first.get("pi_u_true")
    truths = [_sum(true, classes) for _, classes in rows] if true else []
    means = [group.vector("pi_u")[0] for group in groups]
    shares = [[_sum(mean, classes) for mean in means] for _, classes in rows]
    top = max(truths + [s for row in shares for s in row if math.isfinite(s)], default=0.0) or 1.0
    alone = len(groups) == 1 and len(groups[0].runs) == 1 and len(rows) == len(means[0])
    bounds = intervals(first) if alone else None
    reserved = 32 + (_INTERVAL if bounds else 0)
    space = (width - reserved - max(9, *map(len, images))) // len(groups) - 11
    bar_width = max(_MIN_BAR, min(_MAX_BAR, space))
    table = plain_table("unlabeled set", "images", "true")
    if bounds:
        table.add_column(Text("estimate, 95 %", style="bold"), no_wrap=True)
    for group in groups:
        table.add_column(Text(f"{group.label} pi_u", style="bold"), no_wrap=True)
    for row, (title, _) in enumerate(rows):
        truth = truths[row] if truths else None
        bars = (
            f"{_percent(share):>9} {bar(share, truth, top, bar_width, block, mark)}"
            if math.isfinite(share)
            else f"{'-':>9}"
            for share in shares[row]
        )
        interval = [_interval(bounds[row])] if bounds else []
        table.add_row(title, images[row], _percent(truth), *interval, *bars)
    return table


def _interval(found: Interval) -> str:
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.estimate:.1f} % ({low:.0f} to {high:.0f})"


def bar(share: float, truth: float | None, top: float, width: int, block: str, mark: str) -> str:
    cells = f"{block * round(share / top * width):<{width}}"
    at = min(width - 1, max(0, round((truth or 0.0) / top * width) - 1))
    return cells if truth is None else cells[:at] + mark + cells[at + 1 :]


def _rows(summary: dict[str, Any]) -> list[tuple[str, range]]:
    """Titles and groups of classes."""
    names = [str(name) for name in summary["class_names"]]
    return [(f"  {_group_title(group, names)}", group) for group in _groups(len(names))]


def _groups(num_classes: int) -> list[range]:
    """At most `_MAX_ROWS` groups of neighbouring classes, as equal as can be."""
    rows = min(num_classes, _MAX_ROWS)
    borders = [num_classes * row // rows for row in range(rows + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


def _group_title(group: range, names: Sequence[str]) -> str:
    if len(group) > 1:
        return f"{group[0]}-{group[-1]}"
    return _short(names[group[0]], _MAX_NAME)


def _short(name: str, limit: int) -> str:
    return name if len(name) <= limit else f"{name[: limit - 2]}.."


def _total(counts: Sequence[int] | None, group: range) -> str:
    return "-" if counts is None else f"{sum(counts[k] for k in group):,}"


def _sum(values: Sequence[float] | np.ndarray, group: range) -> float:
    return float(sum(values[k] for k in group))


def spread_text(value: tuple[float | None, float | None], digits: int) -> str:
    """Mean and what it spreads, `-` where there is nothing."""
    mean, spread = value
    if mean is None:
        return "-"
    return f"{mean:,.{digits}f}" + ("" if spread is None else f" \u00b1 {spread:,.{digits}f}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def glyphs(out: TextIO) -> tuple[str, str]:
    """Block and mark in the encoding of the output."""
    unicode = (out.encoding or "utf-8").lower().startswith("utf")
    return ("\u2588", "\u2502") if unicode else ("#", "|")
