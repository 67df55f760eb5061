"""Figures with one place per class, in the order of the labeled images: the frequent ones first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simpro_fast.answers.report.figures.style import (
    HATCHES,
    INK,
    MARKERS,
    PAPER,
    TRUTH,
    WIDE,
    Drawn,
    colour,
    legend_below,
    new_figure,
    set_title,
    short,
)
from simpro_fast.answers.report.findings import intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS_UP_TO = 30
"""Classes with a name of their own under the axis."""


@dataclass(frozen=True)
class Series:
    """A value per class, [K] with NaN where there is none."""

    name: str
    colour: str
    place: int
    """Number of the group, for hatch and marker; -1 for the truth."""
    values: np.ndarray
    spread: np.ndarray | None = None
    """As `Group` says, or [2, K] down to and up to the bounds of an interval."""
    mark: np.ndarray | None = None
    """[K], drawn as points over the bars."""


def class_width(drawn: Drawn) -> float:
    """Figure width in inches that leaves room for every bar, at most `WIDE`."""
    wanted = 2 + len(drawn.class_names) * (0.35 + 0.22 * (len(drawn.groups) + 1))
    return min(WIDE, max(8.0, wanted))


def prior(drawn: Drawn) -> Figure | None:
    """The class distribution of the unlabeled set, and the true one: of single runs the estimate
    with intervals, where there is one, with pi_u as a mark; else pi_u at the end."""
    summary = drawn.groups[0].summary
    order = drawn.class_order
    truth = summary.get("pi_u_true")
    series = []
    if truth is not None:
        series.append(Series("true", TRUTH, -1, 100 * np.asarray(truth)[order]))
    for index, group in enumerate(drawn.groups):
        mean, spread = group.vector("pi_u")
        kl, _ = group.number("kl_pi_u")
        note = "" if kl is None else f" (KL {kl:.3f} nats)"
        name, mark = f"{drawn.legend(index)}: pi_u{note}", None
        if len(group.runs) == 1 and (bounds := intervals(group.summary)):
            # The estimate with intervals is what is believed, pi_u what training went by.
            name, mark = f"{drawn.legend(index)}: estimate, 95 % interval", 100 * mean[order]
            mean = np.array([each.estimate for each in bounds])
            sides = [[e.estimate - e.low, e.high - e.estimate] for e in bounds]
            spread = np.maximum(np.array(sides), 0).T
        values, spread = 100 * mean[order], 100 * spread[..., order]
        series.append(Series(name, colour(index), index, values, spread, mark))
    if not any(np.isfinite(s.values).any() for s in series if s.place >= 0):
        return None
    width = class_width(drawn)
    figure = new_figure(width, 4.4)
    axes = figure.add_subplot()
    if len(order) <= _BARS_UP_TO:
        _bars(axes, series)
        axes.set_ylim(bottom=0)
    else:
        # On a linear scale a hundred long-tailed classes would lie on the axis.
        positive = [v for s in series[:1] for v in s.values if v > 0]
        floor = 10.0 ** np.floor(np.log10(min(positive, default=1.0)))
        _points(
            axes, [Series(s.name, s.colour, s.place, np.maximum(s.values, floor)) for s in series]
        )
        axes.set_yscale("log")
        axes.set_ylim(bottom=floor)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.text(
            1.0, 1.0, f"shares below {floor:g} % are drawn there", transform=axes.transAxes,
            ha="right", va="bottom", fontsize=8,
        )  # fmt: skip
    _class_axis(axes, drawn, order)
    axes.set_ylabel("share of the unlabeled set (%)")
    set_title(axes, f"{drawn.title}: class distribution of the unlabeled set", width, pad=14)
    # Bars may fill the axes to the last corner.
    legend_below(figure, axes, width, least=1)
    return figure


def per_class(drawn: Drawn) -> Figure | None:
    """Accuracy of each class at the end."""
    order = drawn.class_order
    series = []
    for index, group in enumerate(drawn.groups):
        mean, spread = group.vector("per_class")
        if np.isfinite(mean).any():
            name = f"{drawn.legend(index)} (mean {np.nanmean(mean):.1f} %)"
            series.append(Series(name, colour(index), index, mean[order], spread[order]))
    if not series:
        return None
    width = class_width(drawn)
    figure = new_figure(width, 4.4)
    axes = figure.add_subplot()
    if len(order) <= _BARS_UP_TO:
        _bars(axes, series)
    else:
        _points(axes, series)
    _class_axis(axes, drawn, order)
    axes.set_ylim(0, 103)
    axes.set_ylabel("test accuracy (%)")
    set_title(axes, f"{drawn.title}: accuracy of each class", width)
    legend_below(figure, axes, width, least=1)
    return figure


def _bars(axes: Axes, series: Sequence[Series]) -> None:
    for index, one in enumerate(series):
        width = 0.8 / len(series)
        positions = np.arange(len(one.values)) + (index - (len(series) - 1) / 2) * width
        bars = axes.bar(positions, one.values, width * 0.94, color=one.colour, label=one.name)
        hatch = HATCHES[one.place % len(HATCHES)] if one.place > 0 else ""
        for bar in bars:
            bar.set(hatch=hatch, edgecolor=PAPER, linewidth=0)
        if one.spread is not None and np.isfinite(one.spread).any():
            axes.errorbar(positions, one.values, one.spread, fmt="none", ecolor=INK, elinewidth=1)
        if one.mark is not None:
            named = any(other.mark is not None for other in series[:index])
            label = None if named else "pi_u, by which training went"
            marks = axes.plot(positions, one.mark, "D", color=PAPER, markersize=4.5, label=label)
            marks[0].set_markeredgecolor(INK)


def _points(axes: Axes, series: Sequence[Series]) -> None:
    """For more classes than bars can show: a shape for the truth, points for the groups."""
    for one in series:
        places = np.arange(len(one.values))
        if one.place < 0:
            axes.fill_between(
                places, one.values, step="mid", color=one.colour, alpha=0.45, lw=0, label=one.name
            )
            continue
        axes.plot(
            places,
            one.values,
            color=one.colour,
            marker=MARKERS[one.place % len(MARKERS)],
            markersize=3.2,
            lw=0.7,
            label=one.name,
            alpha=0.85,
        )


def _class_axis(axes: Axes, drawn: Drawn, order: np.ndarray) -> None:
    """Names under the bars where there are few, else the place of the class."""
    labeled = bool(drawn.groups[0].summary.get("labeled_counts"))
    if len(order) <= _BARS_UP_TO:
        names = [short(drawn.class_names[k], 12) for k in order]
        upright = max(map(len, names)) <= (8 if len(order) <= 10 else 3)
        slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(names)), names, **({} if upright else slanted))
    axes.set_xlabel("class (most labeled first)" if labeled else "class")
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.01)
