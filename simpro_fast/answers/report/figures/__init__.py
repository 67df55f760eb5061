"""Figures of runs, alone or beside each other: PNG files, and SVG for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpro_fast.answers.report.figures.classes import per_class, prior
from simpro_fast.answers.report.figures.matrices import classes_over_time, confusion, reliability
from simpro_fast.answers.report.figures.over_time import accuracy, kl, pseudo_labels
from simpro_fast.answers.report.figures.style import (
    Drawn,
    drawing,
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


def draw_figures(groups: Sequence[Group], folder: Path) -> Figures:
    """Draw what the runs have; PNG files go into `folder`.

    Raises:
        UserError: matplotlib is missing, or a file cannot be written.
    """
    made = Figures([], {}, [{} for _ in groups])
    order = groups[0].class_order

    def make(drawn: Drawn, draw: Draw, stem: str, into: dict[str, str], name: str) -> None:
        if found := draw(drawn):
            save_png(found, folder / f"{stem}.png")
            made.paths.append(folder / f"{stem}.png")
            into[name] = svg_uri(found)

    with drawing():
        for name, draw in _TOGETHER.items():
            make(Drawn(groups, order), draw, name, made.together, name)
        for number, group in enumerate(groups):
            for name, draw in _EACH.items():
                stem = name if len(groups) == 1 else f"{name}_{number + 1}"
                make(Drawn([group], order), draw, stem, made.each[number], name)
    return made
