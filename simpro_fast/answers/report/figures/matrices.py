"""Figures of one experiment: classes against steps, against each other, and confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simpro_fast.answers.report.figures.style import (
    FONT,
    LINES,
    MARKERS,
    MUTED,
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


def classes_over_time(drawn: Drawn, width: float) -> Figure | None:
    """Accuracy, mask rate and precision of every class over the training, mean of the seeds."""
    (group,) = drawn.groups
    panels = []
    for key, scale, title in _OVER_TIME:
        steps, values, _ = group.series(key)
        if values.ndim == 2 and np.isfinite(values).any():
            panels.append((title, steps, scale * values))
    if not panels:
        return None
    order = group.class_order
    each = min(4.5, max(1.5, 0.13 * len(order)))
    figure = new_figure(width, 1.2 + (each + 0.35) * len(panels))
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
        _names(axes.yaxis, drawn, order, each)
        axes.label_outer()
    rows[-1].set_xlabel("step; blank: nothing to count")
    rows[-1].locator_params(axis="x", nbins=5)
    rows[-1].xaxis.set_major_formatter("{x:,.0f}")
    figure.colorbar(
        mesh, ax=list(rows), format="{x:g} %", aspect=25, pad=0.02, shrink=0.5, anchor=(0.0, 1.0)
    )
    title = wrapped(f"{drawn.title}: every class over the training", width - 0.4)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    return figure


def confusion(drawn: Drawn, width: float) -> Figure | None:
    """Draw what the images of each class are taken for, over all seeds, in percent of the class."""
    (group,) = drawn.groups
    num_classes = len(drawn.class_names)
    tables = [table for run in group.runs if (table := run.summary.get("confusion"))]
    if not tables:
        return None
    order = group.class_order
    counts = np.sum(np.array(tables, np.float64), axis=0)[order][:, order]
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(100 * counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    figure = new_figure(width, 0.9 * width)
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(shares), cmap=_MAP, vmin=0, vmax=100)
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        _names(axis, drawn, order, 0.62 * width)
    if num_classes <= _NAMES_UP_TO:
        axes.tick_params(axis="x", rotation=90)
    if num_classes <= _NUMBERS_UP_TO:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:
                # White on the dark end of the map, black on the bright one, in either theme.
                ink = "black" if share > 55 else "#FEFEFE"
                text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
                axes.text(column, row, f"{share:.0f}", color=ink, **text)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    figure.colorbar(image, ax=axes, label="% of the true class", fraction=0.046, pad=0.02)
    set_title(axes, f"{drawn.title}: confusion", width)
    return figure


def reliability(drawn: Drawn, width: float) -> Figure | None:
    """Accuracy against confidence; below the diagonal a network is too sure of itself."""
    known: list[tuple[int, dict[str, Any], list[dict[str, Any]]]] = []
    for index, group in enumerate(drawn.groups):
        found = group.summary.get("reliability")
        bins = [b for b in (found or {}).get("bins", []) if b.get("count")]
        if bins:
            known.append((index, group.summary, bins))
    if not known:
        return None
    figure = new_figure(width, 4.6)
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], ":", color=MUTED, lw=1.2, label="as sure as it is right")
    for index, summary, bins in known:
        ece = summary.get("ece")
        error = "" if ece is None else f" (ECE {100 * ece:.1f} points)"
        axes.plot(
            [100 * b["confidence"] for b in bins],
            [100 * b["accuracy"] for b in bins],
            LINES[index % len(LINES)],
            color=colour(index),
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5,
            lw=1.4,
            label=f"{drawn.legend(index)}{error}",
        )
    axes.set_xlim(0, 103)
    axes.set_ylim(0, 103)
    axes.set_xlabel("confidence (%)")
    axes.set_ylabel("right (%)")
    set_title(axes, f"{drawn.title}: confidence and accuracy on the test images", width)
    legend_below(figure, axes, width)
    return figure


def _names(axis: Any, drawn: Drawn, order: np.ndarray, room: float) -> None:
    """Names of classes at an axis of `room` inches where they fit, else their places."""
    if len(order) <= _NAMES_UP_TO and room / len(order) >= 0.1:
        texts = [short(drawn.class_names[k], 14) for k in order]
        axis.set_ticks(range(len(order)), texts, fontsize=min(9, 60 * room / len(order)))
    else:
        step = next(s for s in (5, 10, 20, 50, 100, 200, 500, 5000) if s * room / len(order) > 0.25)
        axis.set_ticks(range(0, len(order), step))
        axis.set_tick_params(labelsize=8)
    axis.set_tick_params(length=0)
