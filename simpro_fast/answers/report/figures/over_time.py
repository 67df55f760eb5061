"""Figures over the steps of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
)
from simpro_fast.answers.report.runs import kl_of_uniform

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 30
"""Points up to which each is marked."""


@dataclass(frozen=True)
class Panel:
    """A metric over the steps."""

    key: str
    scale: float
    title: str
    ending: str
    """Format of the last values, at the right edge."""
    bottom: float | None = None
    top: float | None = None


def kl(drawn: Drawn) -> Figure | None:
    """How far the estimate is from the truth."""
    truth = drawn.groups[0].summary.get("pi_u_true")
    if truth is None:
        return None
    panel = Panel("kl_pi_u", 1.0, "KL(true || pi_u) (nats)", "{:.3f}", 0)
    return _figure(drawn, "distance of pi_u from the truth", [panel], kl_of_uniform(truth))


def accuracy(drawn: Drawn) -> Figure | None:
    panel = Panel("top1", 1.0, "test accuracy (%)", "{:.1f} %")
    return _figure(drawn, "accuracy of the averaged model", [panel])


def pseudo_labels(drawn: Drawn) -> Figure | None:
    """How many pseudo-labels pass the threshold, and how many of those are right, if known."""
    kept = Panel("mask_rate", 100.0, "kept: above the threshold (%)", "{:.0f} %", 0, 103)
    right = Panel("pseudo_label_accuracy", 1.0, "right, of the kept ones (%)", "{:.0f} %", 0, 103)
    return _figure(drawn, "pseudo-labels", [kept, right])


def throughput(drawn: Drawn) -> Figure | None:
    """Images per second, and the share of the time spent waiting for data."""
    speed = Panel("images_per_second", 1.0, "views per second", "{:,.0f}", 0)
    wait = Panel("data_wait_fraction", 100.0, "waiting for data (%)", "{:.1f} %", 0)
    return _figure(drawn, "throughput", [speed, wait])


def _figure(
    drawn: Drawn, what: str, panels: Sequence[Panel], guess: float | None = None
) -> Figure | None:
    """Draw the panels whose metric some group has; None without any.

    Args:
        guess: value of a uniform guess, as a line.
    """
    panels = [p for p in panels if any(len(group.series(p.key)[0]) for group in drawn.groups)]
    if not panels:
        return None
    figure = new_figure(SMALL, 1.2 + 2.5 * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        ends = _lines(axes, drawn, panel.key, panel.scale)
        if guess is not None:
            axes.axhline(guess, color=MUTED, linestyle=":", label=f"uniform guess ({guess:.3f})")
        axes.set_ylabel(panel.title)
        axes.yaxis.set_major_formatter("{x:,.9g}")
        axes.set_ylim(panel.bottom, panel.top)
        _label_ends(axes, ends, panel.ending, 2.0)
        axes.label_outer()
    set_title(rows[0], f"{drawn.title}: {what}", SMALL)
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
