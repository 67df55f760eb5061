"""Figures of `evaluate` and `shares`: confusion matrix, reliability, class shares."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.answers.report.figures.fonts import BASE
from simpro_fast.answers.report.figures.style import COLOURS, MUTED, drawing, new_figure, save_png
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.printable import printable

_BLUE, _ORANGE, _GREEN = COLOURS[:3]
_NAMES_UP_TO = 40
_NUMBERS_UP_TO = 12


def check_matplotlib() -> None:
    """Find out before any work that figures cannot be drawn.

    Raises:
        UserError: with the pip line and the flag that does without.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"figures need matplotlib: {pip_line('report')}; or give --no-figures")


@drawing([BASE])
def confusion_figure(
    confusion: Sequence[Sequence[int]], class_names: Sequence[str], path: Path
) -> None:
    """Draw what each class is taken for, in percent of its images; grey where it has none."""
    counts = np.asarray(confusion, np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(100 * counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    side = 4.5 + 0.25 * min(len(counts), _NAMES_UP_TO)
    figure = new_figure(side * 1.15, side)
    axes = figure.add_subplot()
    figure.set_layout_engine("compressed")  # an image keeps its shape, which leaves room
    axes.set_facecolor("#DDDDDD")
    axes.grid(False)
    image = axes.imshow(np.ma.masked_invalid(shares), vmin=0, vmax=100, cmap="Blues")
    if len(counts) <= _NAMES_UP_TO:
        names = [printable(name) for name in class_names]
        axes.set_xticks(range(len(counts)), names, rotation=90)
        axes.set_yticks(range(len(counts)), names)
    if len(counts) <= _NUMBERS_UP_TO:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:
                ink = "white" if share > 55 else "black"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=ink)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    figure.colorbar(image, ax=axes, label="% of the true class", fraction=0.046)
    save_png(figure, path)


@drawing([BASE])
def reliability_figure(priors: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy against confidence; below the diagonal a network is too sure of itself."""
    figure = new_figure(5.5, 4.8)
    axes = figure.add_subplot()
    axes.plot([0, 100], [0, 100], ":", color=MUTED, label="as sure as it is right")
    for (name, result), colour, marker in zip(
        priors.items(), (_BLUE, _ORANGE), ("o", "s"), strict=False
    ):
        bins = [b for b in result["reliability"] if b["count"]]
        axes.plot(
            [100 * b["confidence"] for b in bins],
            [100 * b["accuracy"] for b in bins],
            color=colour,
            marker=marker,
            label=f"prior {printable(name)[-24:]} (ECE {100 * result['ece']:.1f} points)",
        )
    axes.set(xlim=(0, 103), ylim=(0, 103), xlabel="confidence (%)", ylabel="right (%)")
    axes.legend()
    save_png(figure, path)


@drawing([BASE])
def shares_figure(document: dict[str, Any], path: Path) -> None:
    """Class shares in percent: the estimate with its interval, and what else was estimated."""
    rows = document["rows"]
    many = len(rows) > _NAMES_UP_TO
    if many:
        rows = sorted(rows, key=lambda row: -row["estimate"])
    places = np.arange(len(rows))
    figure = new_figure(max(6.0, min(14.0, 2 + 0.5 * len(rows))), 4.8)
    axes = figure.add_subplot()
    estimate = 100 * np.array([row["estimate"] for row in rows])
    label = "estimate, 95 % interval" if rows[0]["low"] is not None else "estimate, no interval"
    axes.bar(places, estimate, width=1.0 if many else 0.7, color="#9ECAE9", label=label)
    if rows[0]["low"] is not None:
        low, high = (100 * np.array([row[key] for row in rows]) for key in ("low", "high"))
        if many:
            axes.fill_between(places, low, high, color=_BLUE, alpha=0.35, lw=0)
        else:
            axes.vlines(places, low, high, _BLUE, lw=2.5)
    for key, title, colour, marker in (
        ("pi_u", "pi_u of the training", _ORANGE, "D"),
        ("em", "EM", _GREEN, "x"),
        ("mean_posterior", "mean posterior", MUTED, "_"),
    ):
        shares = 100 * np.array([row[key] for row in rows])
        axes.scatter(
            places, shares, s=14 if many else 45, c=colour, marker=marker, label=title, zorder=3
        )
    if many:
        axes.set_xlabel("classes by estimate")
    else:
        axes.set_xticks(places, [printable(row["class"]) for row in rows], rotation=90)
    axes.set_ylabel("share of the images (%)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{document['images']:,} images")
    figure.legend(loc="outside lower center", ncols=2)
    save_png(figure, path)
