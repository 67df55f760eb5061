"""Figures of one experiment: classes against steps, against each other, and confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    short,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES_UP_TO = 30
_NUMBERS_UP_TO = 12
_MAP = "cividis"
_OVER_TIME = (
    ("per_class", 1.0, "test accuracy"),
    ("mask_rate_per_class", 100.0, "pseudo-labels kept, of those of the class"),
    ("pseudo_label_accuracy_per_class", 1.0, "pseudo-labels right, of the kept ones"),
)


def classes_over_time(drawn: Drawn) -> Figure | None:
    """Accuracy, mask rate and precision of every class over the training, mean of the seeds."""
    (group,) = drawn.groups
    panels = []
    for key, scale, title in _OVER_TIME:
        steps, values, _ = group.series(key)
        if values.ndim == 2 and np.isfinite(values).any():
            panels.append((title, steps, scale * values))
    if not panels:
        return None
    order = drawn.class_order
    each = min(4.5, max(1.5, 0.13 * len(order)))
    figure = new_figure(SMALL, 1.2 + (each + 0.35) * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, steps, values) in zip(rows, panels, strict=True):
        # A row of metrics speaks of the steps since the one before it.
        edges = np.concatenate([[max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else 0], steps])
        mesh = axes.pcolormesh(
            edges,
            np.arange(len(order) + 1) - 0.5,
            np.ma.masked_invalid(values.T[order]),
            cmap=_MAP,
            vmin=0,
            vmax=100,
            rasterized=True,
        )
        axes.set_title(title, fontweight="normal", fontsize=FONT)
        axes.grid(False)
        axes.invert_yaxis()
        _names(axes.yaxis, [drawn.class_names[k] for k in order], each)
        axes.label_outer()
    rows[-1].set_xlabel("step; blank: nothing to count")
    rows[-1].locator_params(axis="x", nbins=5, integer=True)
    rows[-1].xaxis.set_major_formatter("{x:,.0f}")
    figure.colorbar(
        mesh, ax=list(rows), format="{x:g} %", aspect=25, pad=0.02, shrink=0.5, anchor=(0.0, 1.0)
    )
    title = wrapped(f"{drawn.title}: every class over the training", SMALL - 0.4)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    return figure


def confusion(drawn: Drawn) -> Figure | None:
    """Draw what the images of each class are taken for, over all seeds."""
    (group,) = drawn.groups
    tables = [table for run in group.runs if (table := run.summary.get("confusion"))]
    if not tables:
        return None
    order = drawn.class_order
    counts = np.sum(np.array(tables, np.float64), axis=0)[order][:, order]
    names = [drawn.class_names[k] for k in order]
    return confusion_matrix(counts, names, SMALL, f"{drawn.title}: confusion")


def confusion_matrix(
    counts: np.ndarray, class_names: Sequence[str], width: float, title: str
) -> Figure:
    """Counts [K, K], rows true classes, in percent of the class; blank where it has no image."""
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(100 * counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    figure = new_figure(width, 0.9 * width)
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(shares), cmap=_MAP, vmin=0, vmax=100)
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        _names(axis, class_names, 0.62 * width)
    if len(counts) <= _NAMES_UP_TO:
        axes.tick_params(axis="x", rotation=90)
    if len(counts) <= _NUMBERS_UP_TO:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:
                # White on the dark end of the map, black on the bright one, in either theme.
                ink = "black" if share > 55 else "#FEFEFE"
                text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
                axes.text(column, row, f"{share:.0f}", color=ink, **text)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    figure.colorbar(image, ax=axes, label="% of the true class", fraction=0.046, pad=0.02)
    set_title(axes, title, width)
    return figure


def reliability(drawn: Drawn) -> Figure | None:
    """Accuracy against confidence of every group that has been evaluated."""
    results = {}
    for index, group in enumerate(drawn.groups):
        bins = (group.summary.get("reliability") or {}).get("bins", [])
        if any(b.get("count") for b in bins):
            results[drawn.legend(index)] = (colour(index), bins, group.summary.get("ece"))
    if not results:
        return None
    return reliability_diagram(
        results, f"{drawn.title}: confidence and accuracy on the test images"
    )


def reliability_diagram(
    results: Mapping[str, tuple[str, Sequence[dict[str, Any]], float | None]], title: str
) -> Figure:
    """Accuracy against confidence; below the diagonal a network is too sure of itself.

    Args:
        results: by label: colour, bins {count, confidence, accuracy}, and calibration error.
    """
    figure = new_figure(SMALL, 4.6)
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], ":", color=MUTED, lw=1.2, label="as sure as it is right")
    for index, (label, (ink, all_bins, ece)) in enumerate(results.items()):
        bins = [b for b in all_bins if b.get("count")]
        axes.plot(
            [100 * b["confidence"] for b in bins],
            [100 * b["accuracy"] for b in bins],
            LINES[index % len(LINES)],
            color=ink,
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5,
            lw=1.4,
            label=label + ("" if ece is None else f" (ECE {100 * ece:.1f} points)"),
        )
    axes.set(xlim=(0, 103), ylim=(0, 103), xlabel="confidence (%)", ylabel="right (%)")
    set_title(axes, title, SMALL)
    legend_below(figure, axes, SMALL)
    return figure


def _names(axis: Any, names: Sequence[str], room: float) -> None:
    """Names of classes at an axis of `room` inches where they fit, else their places."""
    if len(names) <= _NAMES_UP_TO and room / len(names) >= 0.1:
        texts = [short(name, 14) for name in names]
        axis.set_ticks(range(len(names)), texts, fontsize=min(9, 60 * room / len(names)))
    else:
        step = next(s for s in (5, 10, 20, 50, 100, 200, 500, 5000) if s * room / len(names) > 0.25)
        axis.set_ticks(range(0, len(names), step))
        axis.set_tick_params(labelsize=8)
    axis.set_tick_params(length=0)
