"""What a run learned, as a table for the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simpro_fast.printable import printables
from simpro_fast.report.runs import METHOD_TITLES, kl_of_uniform, run_labels
from simpro_fast.utils.terminal import plain_table, rendered

_MAX_ROWS = 20
_MAX_NAME = 18
_MIN_BAR, _MAX_BAR = 8, 40
_ACCURACIES = {
    "overall": "top1",
    "mean of the classes": "top1_class_mean",
    "many (> 100 labeled)": "many",
    "medium (20 to 100)": "medium",
    "few (< 20)": "few",
    "mean of the last 20 evaluations": "top1_mean_last20",
    "best evaluation": "top1_best",
}


def print_summary(
    summary: dict[str, Any], *, compare: dict[str, Any] | None = None, file: TextIO | None = None
) -> None:
    """Print accuracies and the estimated class distribution of the unlabeled set.

    More than 20 classes are shown in groups of neighbours (accuracies averaged, images and
    shares summed). Without a terminal the text has no escape codes.

    Args:
        summary: the contents of `summary.json`.
        compare: the summary of a second run on the same split.
        file: where to print; default `sys.stdout`.
    """
    out = sys.stdout if file is None else file
    summary, compare = printables(summary), printables(compare)
    summaries = [summary] if compare is None else [summary, compare]
    labels = run_labels(summary, compare)
    width = shutil.get_terminal_size((100, 24)).columns
    block, mark = _glyphs(out)
    parts: list[RenderableType] = [
        *map(_heading, summaries),
        "",
        _accuracy_table(summaries, labels),
        "",
        _class_table(summaries, labels),
        "",
        _distribution_table(summaries, labels, width, block, mark),
    ]
    if summary.get("pi_u_true"):
        values = ", ".join(
            f"{label} {_number(one.get('kl_pi_u'), 3)}"
            for label, one in zip(labels, summaries, strict=True)
        )
        parts.append(
            f"  {block} estimate, {mark} truth; KL(true || estimate) in nats: {values} "
            f"(a uniform guess: {kl_of_uniform(summary['pi_u_true']):.3f})"
        )
    print(rendered(Group(*parts), out, width), file=out)


def _heading(summary: dict[str, Any]) -> Text:
    method = METHOD_TITLES.get(summary["method"], summary["method"])
    speed = summary.get("images_per_second")
    rate = f", {speed:,.0f} images/s" if speed is not None else ""
    seconds = summary.get("seconds")
    time = f" in {_duration(seconds)}" if seconds is not None else ""
    title = (f"{summary['name']}: {method}", "bold")
    return Text.assemble(title, f", seed {summary['seed']}, {summary['steps']:,} steps{time}{rate}")


def _accuracy_table(summaries: Sequence[dict[str, Any]], labels: Sequence[str]) -> Table:
    table = plain_table("test accuracy, %", *labels)
    for title, key in _ACCURACIES.items():
        table.add_row(f"  {title}", *(_number(s.get(key), 1) for s in summaries))
    return table


def _class_table(summaries: Sequence[dict[str, Any]], labels: Sequence[str]) -> Table:
    """Accuracy of each class, or of each group of neighbours, beside its labeled images."""
    table = plain_table("test accuracy, %", "labeled", *labels)
    for title, group in _rows(summaries[0]):
        values = (_number(_mean(summary["per_class"], group), 1) for summary in summaries)
        table.add_row(title, _total(summaries[0]["labeled_counts"], group), *values)
    return table


def _distribution_table(
    summaries: Sequence[dict[str, Any]], labels: Sequence[str], width: int, block: str, mark: str
) -> Table:
    """Shares of the classes in the unlabeled set: the truth, and every run's estimate as a bar."""
    first, rows = summaries[0], _rows(summaries[0])
    images = [_total(first.get("unlabeled_counts"), group) for _, group in rows]
    true = first.get("pi_u_true")
    truths = [_sum(true, group) for _, group in rows] if true else []
    shares = [[_sum(summary["pi_u"], group) for summary in summaries] for _, group in rows]
    top = max(truths + [share for row in shares for share in row]) or 1.0
    space = (width - 32 - max(9, *map(len, images))) // len(summaries) - 11
    bar_width = max(_MIN_BAR, min(_MAX_BAR, space))
    table = plain_table("unlabeled set", "images", "true")
    for label in labels:
        table.add_column(Text(f"{label} estimate", style="bold"), no_wrap=True)
    for row, (title, _) in enumerate(rows):
        truth = truths[row] if truths else None
        bars = (
            f"{_percent(share):>9} {_bar(share, truth, top, bar_width, block, mark)}"
            for share in shares[row]
        )
        table.add_row(title, images[row], _percent(truth), *bars)
    return table


def _bar(share: float, truth: float | None, top: float, width: int, block: str, mark: str) -> str:
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
    name = names[group[0]]
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 2]}.."


def _total(counts: Sequence[int] | None, group: range) -> str:
    return "-" if counts is None else f"{sum(counts[k] for k in group):,}"


def _mean(values: Sequence[float | None] | None, group: range) -> float | None:
    known = [value for k in group if values and (value := values[k]) is not None]
    return sum(known) / len(known) if known else None


def _sum(values: Sequence[float], group: range) -> float:
    return sum(values[k] for k in group)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _glyphs(out: TextIO) -> tuple[str, str]:
    """Block and mark in the encoding of the output."""
    unicode = (out.encoding or "utf-8").lower().startswith("utf")
    return ("\u2588", "\u2502") if unicode else ("#", "|")
