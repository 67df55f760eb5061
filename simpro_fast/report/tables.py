"""Tables of experiments in Markdown and LaTeX: mean and standard deviation over seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from simpro_fast.printable import printable
from simpro_fast.report.published import Published


@dataclass(frozen=True)
class Metric:
    """How a number of summary.json is shown."""

    key: str
    title: str
    digits: int
    published: bool = False
    """Whether published accuracies may stand beside it."""


METRICS = {
    metric.key: metric
    for metric in (
        Metric("top1", "top-1 %", 1, published=True),
        Metric("top1_mean_last20", "top-1 %, mean of the last 20 evaluations", 1),
        Metric("top1_class_mean", "top-1 %, mean of the classes", 1),
        Metric("kl_pi_u", "KL(true, pi_u), nats", 3),
    )
}


@dataclass
class Cell:
    """One experiment: its values over seeds, and what is published for it."""

    values: list[float] = field(default_factory=list)
    seeds: int = 0
    """How many there shall be."""
    published: Published | None = None


@dataclass
class Block:
    """A table of one metric."""

    metric: Metric
    columns: list[str]
    rows: dict[str, list[Cell]]


def markdown(blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """All blocks as one table each, then the notes."""
    lines: list[str] = []
    for block in blocks:
        header = [block.metric.title, *block.columns, *_mean_title(block)]
        lines += [_line(header), "|---" * len(header) + "|"]
        for title, cells in block.rows.items():
            texts = [_cell(cell, block.metric, "±") for cell in cells]
            lines.append(_line([title, *texts, *_mean(block, cells)]))
        lines.append("")
    return "\n".join([*lines, *(f"{note}\n" for note in notes)])


def latex(blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """The same as `tabular` environments, for the package booktabs; notes are comments."""
    lines = [f"% {printable(note)}" for note in notes] + [r"% \usepackage{booktabs}"]
    for block in blocks:
        header = [block.metric.title, *block.columns, *_mean_title(block)]
        lines += [
            rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}",
            r"\toprule",
            _row(map(_escape, header)),
            r"\midrule",
        ]
        for title, cells in block.rows.items():
            texts = [_cell(cell, block.metric, r"$\pm$") for cell in cells]
            lines.append(_row([_escape(title), *texts, *_mean(block, cells)]))
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int, sign: str = "±") -> str:
    """Mean, and the standard deviation of more than one value."""
    text = f"{fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} {sign} {stdev(values):.{digits}f}"


def _cell(cell: Cell, metric: Metric, sign: str) -> str:
    """Mean, deviation, number of seeds where some are missing, and the published number."""
    text = "-"
    if cell.values:
        text = spread(cell.values, metric.digits, sign)
        if len(cell.values) < cell.seeds:
            text += f" ({len(cell.values)} of {cell.seeds} seeds)"
    if metric.published and cell.published is not None:
        number = cell.published
        deviation = "" if number.std is None else f" {sign} {number.std:.2f}"
        text += f" [{number.mean:.1f}{deviation}]"
    return text


def _mean_title(block: Block) -> list[str]:
    return ["mean"] if len(block.columns) > 1 else []


def _mean(block: Block, cells: Sequence[Cell]) -> list[str]:
    """Of the columns' means, where all are there."""
    if len(block.columns) < 2:
        return []
    means = [fmean(cell.values) for cell in cells if cell.values]
    return [f"{fmean(means):.{block.metric.digits}f}" if len(means) == len(cells) else "-"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(printable(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _escape(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(
        r"[\\~^&%$#_{}]", lambda found: words.get(found[0], f"\\{found[0]}"), printable(text)
    )
