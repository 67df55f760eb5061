"""What a run learned, as a table for the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TextIO

from simpro_fast.printable import printables
from simpro_fast.report.runs import METHOD_TITLES, kl_of_uniform, run_labels

_MAX_ROWS = 20
_MAX_NAME = 18
_MIN_BAR, _MAX_BAR = 16, 40
_BLOCK, _MARK = "\u2588", "\u2502"
_BOLD, _RESET = "\033[1m", "\033[0m"


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
    for one in summaries:
        print(_heading(one, out), file=out)
    for table in (_accuracy_table, _class_table, _distribution_table):
        print(file=out)
        for line in table(summaries, labels, out):
            print(line, file=out)


def _heading(summary: dict[str, Any], out: TextIO) -> str:
    method = METHOD_TITLES.get(summary["method"], summary["method"])
    speed = summary.get("images_per_second")
    rate = f", {speed:,.0f} images/s" if speed is not None else ""
    seconds = summary.get("seconds")
    time = f" in {_duration(seconds)}" if seconds is not None else ""
    title = _bold(f"{summary['name']}: {method}", out)
    return f"{title}, seed {summary['seed']}, {summary['steps']:,} steps{time}{rate}"


def _accuracy_table(
    summaries: Sequence[dict[str, Any]], labels: Sequence[str], out: TextIO
) -> list[str]:
    rows = [
        ("overall", "top1"),
        ("mean of the classes", "top1_class_mean"),
        ("many (> 100 labeled)", "many"),
        ("medium (20 to 100)", "medium"),
        ("few (< 20)", "few"),
        ("mean of the last 20 evaluations", "top1_mean_last20"),
        ("best evaluation", "top1_best"),
    ]
    width = max(10, *(len(label) + 2 for label in labels))
    head = f"{'test accuracy, %':<34}" + "".join(f"{label:>{width}}" for label in labels)
    lines = [_bold(head, out)]
    for title, key in rows:
        values = "".join(f"{_number(s.get(key), 1):>{width}}" for s in summaries)
        lines.append(f"  {title:<32}{values}")
    return lines


def _class_table(
    summaries: Sequence[dict[str, Any]], labels: Sequence[str], out: TextIO
) -> list[str]:
    """Accuracy of each class, or of each group of neighbours, beside its labeled images."""
    groups, titles, width = _rows(summaries[0])
    columns = [("labeled", [_total(summaries[0]["labeled_counts"], g) for g in groups])]
    for summary, label in zip(summaries, labels, strict=True):
        columns.append((label, [_number(_mean(summary["per_class"], g), 1) for g in groups]))
    heads = "".join(f"{head:>{max(10, len(head) + 2)}}" for head, _ in columns)
    lines = [_bold(f"{'test accuracy, %':<{width}}{heads}", out)]
    for row, title in enumerate(titles):
        cells = "".join(f"{cells[row]:>{max(10, len(head) + 2)}}" for head, cells in columns)
        lines.append(f"  {title:<{width - 2}}{cells}")
    return lines


def _distribution_table(
    summaries: Sequence[dict[str, Any]], labels: Sequence[str], out: TextIO
) -> list[str]:
    """Shares of the classes in the unlabeled set: the truth, and every run's estimate as a bar."""
    first = summaries[0]
    groups, titles, width = _rows(first)
    truth = _sums(first["pi_u_true"], groups) if first.get("pi_u_true") else None
    estimates = [_sums(summary["pi_u"], groups) for summary in summaries]
    space = shutil.get_terminal_size((100, 24)).columns - width - 20
    bar_width = max(_MIN_BAR, min(_MAX_BAR, space // len(summaries) - 11))
    block, mark = _glyphs(out)
    top = max(max(shares) for shares in [*estimates, truth or [0.0]]) or 1.0
    head = f"{'unlabeled set':<{width}}{'images':>10}{'true':>10}"
    for label in labels:
        head += f"  {label + ' estimate':<{bar_width + 9}}"
    lines = [_bold(head.rstrip(), out)]
    for row, title in enumerate(titles):
        line = f"  {title:<{width - 2}}{_total(first.get('unlabeled_counts'), groups[row]):>10}"
        true_share = None if truth is None else truth[row]
        line += _percent(true_share)
        for shares in estimates:
            bar = _bar(shares[row], true_share, top, bar_width, block, mark)
            line += f"{_percent(shares[row])} {bar}"
        lines.append(line.rstrip())
    values = ", ".join(
        f"{label} {_number(summary.get('kl_pi_u'), 3)}"
        for label, summary in zip(labels, summaries, strict=True)
    )
    if truth is not None:
        guess = kl_of_uniform(first["pi_u_true"])
        lines.append(f"  {block} estimate, {mark} truth; KL(true || estimate) in nats: {values}")
        lines[-1] += f" (a uniform guess: {guess:.3f})"
    return lines


def _rows(summary: dict[str, Any]) -> tuple[list[range], list[str], int]:
    """Groups of classes, their titles, and the width of the first column."""
    names = [str(name) for name in summary["class_names"]]
    groups = _groups(len(names))
    titles = [_group_title(group, names) for group in groups]
    return groups, titles, max(18, *(len(title) + 2 for title in titles))


def _bar(share: float, truth: float | None, top: float, width: int, block: str, mark: str) -> str:
    cells = [block] * round(share / top * width)
    cells += [" "] * (width - len(cells))
    if truth is not None:
        cells[min(width - 1, max(0, round(truth / top * width) - 1))] = mark
    return "".join(cells)


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


def _sums(values: Sequence[float], groups: Sequence[range]) -> list[float]:
    return [sum(values[k] for k in group) for group in groups]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return f"{'-':>10}" if share is None else f"{100 * share:>8.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _bold(text: str, out: TextIO) -> str:
    styled = out.isatty() and "NO_COLOR" not in os.environ
    return f"{_BOLD}{text}{_RESET}" if styled else text


def _glyphs(out: TextIO) -> tuple[str, str]:
    """Block and mark in the encoding of the output."""
    try:
        (_BLOCK + _MARK).encode(out.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#", "|"
    return _BLOCK, _MARK
