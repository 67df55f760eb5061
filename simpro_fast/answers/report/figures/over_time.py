"""Figures over the steps of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simpro_fast.answers.report.figures.style import (
    FONT,
    LINES,
    MARKERS,
    MUTED,
    SMALL,
    Drawn,
    colour,
    legend_below,
    new_figure,
    set_title,
    wrapped,
)
from simpro_fast.answers.report.runs import kl_of_uniform

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 30
"""Points up to which each is marked."""


def kl(drawn: Drawn) -> Figure | None:
    """How far the estimate is from the truth."""
    truth = drawn.groups[0].summary.get("pi_u_true")
    if truth is None:
        return None
    figure = new_figure(SMALL, 3.7)
    axes = figure.add_subplot()
    guess = kl_of_uniform(truth)
    ends = _lines(axes, drawn, "kl_pi_u", 1.0)
    axes.axhline(guess, color=MUTED, linestyle=":", label=f"uniform guess ({guess:.3f})")
    axes.set_ylabel("KL(true || pi_u) (nats)")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    _label_ends(axes, ends, "{:.3f}", 2.3)
    set_title(axes, f"{drawn.title}: distance of pi_u from the truth", SMALL)
    legend_below(figure, axes, SMALL)
    return figure


def accuracy(drawn: Drawn) -> Figure | None:
    figure = new_figure(SMALL, 3.7)
    axes = figure.add_subplot()
    ends = _lines(axes, drawn, "top1", 1.0)
    if not ends:
        return None
    axes.set_ylabel("test accuracy (%)")
    _label_ends(axes, ends, "{:.1f} %", 2.4)
    set_title(axes, f"{drawn.title}: accuracy of the averaged model", SMALL)
    legend_below(figure, axes, SMALL)
    return figure


def pseudo_labels(drawn: Drawn) -> Figure | None:
    """How many pseudo-labels pass the threshold, and how many of those are right, if known."""
    panels = [
        (key, scale, title)
        for key, scale, title in (
            ("mask_rate", 100.0, "kept: above the threshold"),
            ("pseudo_label_accuracy", 1.0, "right, of the kept ones"),
        )
        if key == "mask_rate" or any(len(group.series(key)[0]) for group in drawn.groups)
    ]
    figure = new_figure(SMALL, 0.9 + 2.5 * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (key, scale, title) in zip(rows, panels, strict=True):
        ends = _lines(axes, drawn, key, scale)
        axes.set_ylabel("pseudo-labels (%)")
        axes.set_ylim(0, 103)
        axes.set_title(title, fontweight="normal", fontsize=FONT)
        _label_ends(axes, ends, "{:.0f} %", 1.7)
        axes.label_outer()
    figure.suptitle(
        wrapped(f"{drawn.title}: pseudo-labels", SMALL - 0.4), fontweight="bold", fontsize=11
    )
    legend_below(figure, rows[0], SMALL)
    return figure


def throughput(drawn: Drawn) -> Figure | None:
    """Images per second, and the share of the time spent waiting for data."""
    if not any(len(group.series("images_per_second")[0]) for group in drawn.groups):
        return None
    figure = new_figure(SMALL, 5.4)
    rows = figure.subplots(2, 1, sharex=True)
    for axes, key, scale, what, ending in (
        (rows[0], "images_per_second", 1.0, "views per second", "{:,.0f}"),
        (rows[1], "data_wait_fraction", 100.0, "waiting for data (%)", "{:.1f} %"),
    ):
        ends = _lines(axes, drawn, key, scale)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(what)
        axes.yaxis.set_major_formatter("{x:,.0f}" if key == "images_per_second" else "{x:g}")
        _label_ends(axes, ends, ending, 1.7)
        axes.label_outer()
    set_title(rows[0], f"{drawn.title}: throughput", SMALL)
    legend_below(figure, rows[0], SMALL)
    return figure


End = tuple[float, int]


def _lines(axes: Axes, drawn: Drawn, key: str, scale: float) -> list[End]:
    """One line per group, of several seeds their mean in a band of a standard deviation.

    Returns:
        (last value, group) of those that have the metric.
    """
    ends = []
    for index, group in enumerate(drawn.groups):
        steps, mean, spread = group.series(key)
        if not len(steps):
            continue
        axes.plot(
            steps,
            scale * mean,
            LINES[index % len(LINES)],
            color=colour(index),
            label=drawn.legend(index),
            marker=MARKERS[index % len(MARKERS)] if len(steps) <= _FEW else None,
            markersize=3.5,
            lw=1.6,
        )
        if np.isfinite(spread).any():
            low, high = scale * (mean - spread), scale * (mean + spread)
            axes.fill_between(steps, low, high, color=colour(index), alpha=0.15, lw=0)
        ends.append((scale * float(mean[-1]), index))
    axes.set_xlabel("step")
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.02)
    return ends


def _label_ends(axes: Axes, ends: list[End], ending: str, height: float) -> None:
    """Last values at the right edge, pushed apart where they would print over each other.

    Args:
        height: of the axes in inches, roughly.
    """
    size = FONT if len(ends) <= 4 else 8.0
    low, high = axes.get_ylim()
    points = 72 * height / (high - low)
    step = 1.25 * size
    wanted = sorted((points * (value - low), value, index) for value, index in ends)
    for (place, value, index), shown in zip(
        wanted, spread_out([w[0] for w in wanted], step, 0.0, 72 * height - step / 2), strict=True
    ):
        axes.annotate(
            ending.format(value),
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(5, shown - place),
            textcoords="offset points",
            va="center",
            fontsize=size,
            color=colour(index),
            annotation_clip=False,
        )


def spread_out(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places, moved so that neighbours are `gap` apart, from `low` to `high`."""
    shown: list[float] = []
    for place in places:
        shown.append(max(place, shown[-1] + gap if shown else low))
    for k in reversed(range(len(shown))):
        shown[k] = min(shown[k], shown[k + 1] - gap if k + 1 < len(shown) else high)
    return shown
