"""Figures over the steps of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simpro_fast.answers.report.figures.style import (
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
    bottom: float | None = None
    top: float | None = None


def kl(drawn: Drawn) -> Figure | None:
    """How far the estimate is from the truth."""
    truth = drawn.groups[0].summary.get("pi_u_true")
    if truth is None:
        return None
    panel = Panel("kl_pi_u", 1.0, "KL(true || pi_u) (nats)", 0)
    return _figure(drawn, "distance of pi_u from the truth", [panel], kl_of_uniform(truth))


def accuracy(drawn: Drawn) -> Figure | None:
    panel = Panel("top1", 1.0, "test accuracy (%)")
    return _figure(drawn, "accuracy of the averaged model", [panel])


def pseudo_labels(drawn: Drawn) -> Figure | None:
    """How many pseudo-labels pass the threshold, and how many of those are right, if known."""
    kept = Panel("mask_rate", 100.0, "kept: above the threshold (%)", 0, 103)
    right = Panel("pseudo_label_accuracy", 1.0, "right, of the kept ones (%)", 0, 103)
    return _figure(drawn, "pseudo-labels", [kept, right])


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
        _lines(axes, drawn, panel.key, panel.scale)
        if guess is not None:
            axes.axhline(guess, color=MUTED, linestyle=":", label=f"uniform guess ({guess:.3f})")
        axes.set_ylabel(panel.title)
        axes.yaxis.set_major_formatter("{x:,.9g}")
        axes.set_ylim(panel.bottom, panel.top)
        axes.label_outer()
    set_title(rows[0], f"{drawn.title}: {what}", SMALL)
    legend_below(figure, rows[0], SMALL)
    return figure


def _lines(axes: Axes, drawn: Drawn, key: str, scale: float) -> None:
    """One line per group, of several runs their mean in a band of what it spreads."""
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
    axes.set_xlabel("step")
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.02)
