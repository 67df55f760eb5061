"""Figures of runs, alone or beside each other: PNG files, and SVG for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpro_fast.answers.report.figures.classes import per_class, prior
from simpro_fast.answers.report.figures.matrices import classes_over_time, confusion, reliability
from simpro_fast.answers.report.figures.over_time import accuracy, kl, pseudo_labels, throughput
from simpro_fast.answers.report.figures.style import (
    BASE,
    Drawn,
    drawing,
    fonts_for,
    save_png,
    svg_uri,
)
from simpro_fast.answers.report.groups import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Drawn], "Figure | None"]
_TOGETHER: dict[str, Draw] = {
    "prior": prior,
    "kl": kl,
    "accuracy": accuracy,
    "pseudo_labels": pseudo_labels,
    "per_class": per_class,
    "reliability": reliability,
    "throughput": throughput,
}
_EACH: dict[str, Draw] = {"classes_over_time": classes_over_time, "confusion": confusion}


@dataclass(frozen=True)
class Figures:
    """Figures that were drawn."""

    paths: list[Path]
    """PNG files, in reading order."""
    together: dict[str, str]
    """data: addresses of SVG of all groups, by the name of the file."""
    each: list[dict[str, str]]
    """The same of every group alone."""
    notes: list[str]
    """Names that no font here can draw."""


def draw_figures(groups: Sequence[Group], folder: Path) -> Figures:
    """Draw what the runs have; PNG files go into `folder`.

    Raises:
        UserError: matplotlib is missing, or a file cannot be written.
    """
    made = Figures([], {}, [{} for _ in groups], [])

    def make(drawn: Drawn, draw: Draw, stem: str, into: dict[str, str], name: str) -> None:
        if found := draw(drawn):
            save_png(found, folder / f"{stem}.png")
            made.paths.append(folder / f"{stem}.png")
            into[name] = svg_uri(found)

    with drawing([BASE]):
        drawn, notes = _drawn(groups)
    made.notes.extend(notes)
    with drawing(drawn.families):
        for name, draw in _TOGETHER.items():
            make(drawn, draw, name, made.together, name)
        for number, group in enumerate(groups):
            alone = replace(
                drawn,
                groups=[group],
                labels=[drawn.labels[number]],
                names=[drawn.names[number]],
            )
            for name, draw in _EACH.items():
                stem = name if len(groups) == 1 else f"{name}_{number + 1}"
                make(alone, draw, stem, made.each[number], name)
    return made


def _drawn(groups: Sequence[Group]) -> tuple[Drawn, list[str]]:
    """Names as they can be drawn, and a note where one cannot."""
    names = [str(name) for name in groups[0].summary["class_names"]]
    labels = [group.label for group in groups]
    runs = [str(group.summary["name"]) for group in groups]
    families, missing = fonts_for([*names, *labels, *runs])

    def drawable(name: str, otherwise: str) -> str:
        return otherwise if missing.intersection(name) else name

    def escaped(text: str) -> str:
        return drawable(text, text.encode("unicode_escape").decode())

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
        [drawable(name, f"#{k}") for k, name in enumerate(names)],
        families,
    )
    return drawn, notes
