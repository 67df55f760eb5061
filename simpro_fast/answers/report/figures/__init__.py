"""Figures of runs, alone or beside each other: PNG files, and SVG for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpro_fast.answers.report.figures.classes import per_class, prior
from simpro_fast.answers.report.figures.fonts import BASE, drawable, fonts_for
from simpro_fast.answers.report.figures.matrices import classes_over_time, confusion, reliability
from simpro_fast.answers.report.figures.over_time import accuracy, kl, pseudo_labels, throughput
from simpro_fast.answers.report.figures.style import (
    PHONE,
    SMALL,
    Drawn,
    drawing,
    save_png,
    svg_uri,
)
from simpro_fast.answers.report.figures.views import views_sheet
from simpro_fast.answers.report.groups import Group
from simpro_fast.answers.report.pictures import ViewsFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 14.0
"""Most inches of a figure with a place per class."""
Draw = Callable[[Drawn, float], "Figure | None"]
_TOGETHER: dict[str, tuple[Draw, float]] = {
    "prior": (prior, WIDE),
    "kl": (kl, SMALL),
    "accuracy": (accuracy, SMALL),
    "pseudo_labels": (pseudo_labels, SMALL),
    "per_class": (per_class, WIDE),
    "reliability": (reliability, SMALL),
    "throughput": (throughput, SMALL),
}
_EACH: dict[str, tuple[Draw, float]] = {
    "classes_over_time": (classes_over_time, SMALL),
    "confusion": (confusion, SMALL),
}


@dataclass(frozen=True)
class Picture:
    """A figure for the page."""

    uri: str
    """data: address of an SVG."""
    phone: str | None
    """The same for a narrow screen; None where one serves both."""


@dataclass(frozen=True)
class Figures:
    """Figures that were drawn."""

    paths: list[Path]
    """PNG files, in reading order."""
    together: dict[str, Picture]
    """Pictures of all groups, by the name of the file."""
    each: list[dict[str, Picture]]
    """The same of every group alone."""
    notes: list[str]
    """Names that no font here can draw."""


def draw_figures(groups: Sequence[Group], folder: Path, views: ViewsFigure | None) -> Figures:
    """Draw what the runs have; PNG files go into `folder`.

    Args:
        views: of the first run.

    Raises:
        UserError: matplotlib is missing, or a file cannot be written.
    """
    made = Figures([], {}, [{} for _ in groups], [])

    def make(drawn: Drawn, figure: tuple[Draw, float], stem: str) -> Picture | None:
        draw, wide = figure
        found = draw(drawn, wide)
        if found is None:
            return None
        save_png(found, folder / f"{stem}.png")
        made.paths.append(folder / f"{stem}.png")
        phone = draw(drawn, PHONE) if wide > SMALL else None
        return Picture(svg_uri(found), None if phone is None else svg_uri(phone))

    with drawing([BASE]):
        drawn, notes = _drawn(groups)
    made.notes.extend(notes)
    with drawing(drawn.families):
        for name, figure in _TOGETHER.items():
            if picture := make(drawn, figure, name):
                made.together[name] = picture
        for number, group in enumerate(groups):
            alone = replace(
                drawn,
                groups=[group],
                labels=[drawn.labels[number]],
                names=[drawn.names[number]],
            )
            for name, figure in _EACH.items():
                stem = name if len(groups) == 1 else f"{name}_{number + 1}"
                if picture := make(alone, figure, stem):
                    made.each[number][name] = picture
        if views is not None:
            save_png(views_sheet(views), folder / "views.png")
            made.paths.append(folder / "views.png")
    return made


def _drawn(groups: Sequence[Group]) -> tuple[Drawn, list[str]]:
    """Names as they can be drawn, and a note where one cannot."""
    names = [str(name) for name in groups[0].summary["class_names"]]
    labels = [group.label for group in groups]
    runs = [str(group.summary["name"]) for group in groups]
    families, missing = fonts_for([*names, *labels, *runs])

    def escaped(text: str) -> str:
        return drawable(text, missing, text.encode("unicode_escape").decode())

    lost = [k for k, name in enumerate(names) if missing.intersection(name)]
    notes = []
    if lost:
        shown = ", ".join(f"{k} ({names[k]})" for k in lost[:5]) + (" ..." if lost[5:] else "")
        notes.append(
            "no installed font has all letters of the names of these classes, which the figures "
            f"call by their number: {shown}; a font such as Noto of their script helps"
        )
    if any(missing.intersection(text) for text in (*labels, *runs)):
        notes.append("the figures show letters of a run's name that no installed font has as codes")
    drawn = Drawn(
        groups,
        [escaped(label) for label in labels],
        [escaped(run) for run in runs],
        [drawable(name, missing, f"#{k}") for k, name in enumerate(names)],
        families,
    )
    return drawn, notes
