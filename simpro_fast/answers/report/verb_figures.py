"""Figures of `evaluate` and `shares`: confusion matrix, reliability, class shares."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.answers.class_shares import images_of
from simpro_fast.answers.report.figures.matrices import confusion_matrix, reliability_diagram
from simpro_fast.answers.report.figures.style import (
    COLOURS,
    MUTED,
    drawing,
    new_figure,
    save_png,
)
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.printable import printable

_BLUE, _ORANGE, _GREEN = COLOURS[:3]
_NAMES_UP_TO = 40


def check_matplotlib() -> None:
    """Find out before any work that figures cannot be drawn.

    Raises:
        UserError: with the pip line and the flag that does without.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"figures need matplotlib: {pip_line('report')}; or give --no-figures")


@drawing()
def confusion_figure(
    confusion: Sequence[Sequence[int]], class_names: Sequence[str], path: Path
) -> None:
    """Draw what each class is taken for, in percent of its images; blank where it has none."""
    width = 4.5 + 0.25 * min(len(confusion), _NAMES_UP_TO)
    names = [printable(name) for name in class_names]
    save_png(confusion_matrix(np.asarray(confusion), names, width, "Confusion"), path)


@drawing()
def reliability_figure(priors: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy against confidence under each prior."""
    results = {
        f"prior {printable(name)[-24:]}": (colour, result["reliability"], result["ece"])
        for (name, result), colour in zip(priors.items(), (_BLUE, _ORANGE), strict=False)
    }
    save_png(reliability_diagram(results, "Confidence and accuracy"), path)


@drawing()
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
        ("em", "EM", _GREEN, "x")
        if rows[0]["em_calibrated"] is None
        else ("em_calibrated", "EM, calibrated", _GREEN, "x"),
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
    axes.set_title(images_of(document))
    figure.legend(loc="outside lower center", ncols=2)
    save_png(figure, path)
