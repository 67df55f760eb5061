"""The figure of bench/prior_estimates.py: KL of every estimate over the steps, by distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from experiment import DISTRIBUTIONS, METHODS

from simpro_fast.answers.report.figures.style import COLOURS, GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST = 1e-3
"""Nats; what is less is drawn there."""
FINAL = (("bbse", "D", "BBSE"), ("em", "s", "EM"))


def draw(
    path: Path,
    lines: Sequence[dict[str, Any]],
    curves: Sequence[dict[str, Any]],
    *,
    own: Sequence[str],
    title: str,
) -> None:
    """A panel for each distribution, means over the seeds, and the legend beside them.

    Args:
        lines, curves: of bench/prior_estimates.py.
        own: methods with an estimate of their own, drawn in full lines.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [d for d in DISTRIBUTIONS if any(r["distribution"] == d for r in lines)]
    columns = math.ceil(math.sqrt(len(shown) + 1))
    rows = math.ceil((len(shown) + 1) / columns)
    size = (4.6 * columns, 3.7 * rows)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    panels = grid.flatten()
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    styles = _styles(own)
    handles: dict[str, Any] = {}
    for panel, distribution in zip(panels, shown, strict=False):
        part, inner = (
            [r for r in rows if r["distribution"] == distribution] for rows in (lines, curves)
        )
        handles |= _panel(panel, part, inner, styles)
        panel.set_title(distribution.replace("_", "-"), fontweight="bold", color=INK)
    panels[0].set_ylim(bottom=0.9 * LOWEST)  # of all
    for row in grid:
        row[0].set_ylabel("KL(true || estimate), nats")
    order = [METHODS[m] for m in styles if METHODS[m] in handles]
    order += sorted(handles.keys() - order)
    panels[len(shown)].legend(
        [handles[name] for name in order],
        order,
        loc="center",
        frameon=False,
        fontsize=9,
        handlelength=3.2,
        ncols=2 if len(order) > 9 else 1,
        title="full lines: the method's own estimate\nthin: counts of kept pseudo-labels\n"
        f"below {LOWEST:g}: drawn at {LOWEST:g}",
    )
    figure.suptitle(f"How far the estimated class distribution is from the truth ({title})")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _styles(own: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each method, strong and full with an estimate of its own, else thin and broken."""
    styles: dict[str, dict[str, Any]] = {
        method: {"color": colour, "linewidth": 2.2, "zorder": 3}
        for method, colour in zip(own, COLOURS, strict=False)
    }
    rest = COLOURS[len(own) :]
    for i, method in enumerate(m for m in METHODS if m not in own):
        dash = (":", (0, (5, 1.5, 1, 1.5)))[i // len(rest) % 2]
        styles[method] = {"color": rest[i % len(rest)], "linewidth": 1.3, "linestyle": dash}
    return styles


def _panel(
    panel: Axes,
    lines: Sequence[dict[str, Any]],
    curves: Sequence[dict[str, Any]],
    styles: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Draw one distribution; returns what the legend shows, by name."""
    handles: dict[str, Any] = {}
    last = max(int(r["steps"]) for r in curves)
    for method, style in styles.items():
        mine = [r for r in curves if r["method"] == method]
        # Seeds of one length; others would have no common steps.
        for steps in sorted({(int(r["steps"]), int(r["period_steps"])) for r in mine}):
            same = [r for r in mine if (int(r["steps"]), int(r["period_steps"])) == steps]
            values = np.mean([[float(v) for v in r["kl"].split()] for r in same], axis=0)
            at = np.minimum(steps[1] * np.arange(1, len(values) + 1), steps[0])
            (handles[METHODS[method]],) = panel.plot(at, np.maximum(values, LOWEST), **style)
    simpro = [r for r in lines if r["method"] == "simpro"]
    for name, marker, text in FINAL:
        if simpro:
            value = float(np.mean([float(r[f"kl_{name}"]) for r in simpro]))
            handles[f"{text}, final SimPro network"] = panel.scatter(
                1.04 * last,
                max(value, LOWEST),
                s=46,
                marker=marker,
                color=COLOURS[0],
                edgecolor=INK,
                zorder=4,
                clip_on=False,
            )
    uniform = max(float(lines[0]["kl_uniform"]), LOWEST)
    handles["uniform guess"] = panel.axhline(uniform, color=MUTED, linestyle="--", linewidth=1.5)
    panel.set_yscale("log")
    panel.set_xlim(0, 1.08 * last)
    panel.set_xlabel("step")
    panel.grid(axis="y", color=GRID)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    return handles
