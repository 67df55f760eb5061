"""The sheet of training views as a figure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from simpro_fast.answers.report.figures.style import new_figure, short
from simpro_fast.answers.report.pictures import ViewsFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = (
    "Below strong views: the operations applied, in order, each with its level "
    "from 1 to 9 where it has one"
)


def views_sheet(views: ViewsFigure) -> Figure:
    """Images as columns, views as rows."""
    count, num_strong = views.strong.shape[:2]
    rows = [("original", views.original), ("weak", views.weak)]
    rows += [(f"strong {v + 1}", views.strong[:, v]) for v in range(num_strong)]
    width, height = 1.35 * count + 0.8, 1.75 * len(rows) + 1.0
    figure = new_figure(width, height)
    # Fixed margins: the captions differ in length and would otherwise squeeze the images.
    figure.set_layout_engine("none")
    grid = figure.subplots(
        len(rows),
        count,
        squeeze=False,
        gridspec_kw={
            "left": 0.5 / width,
            "right": 1 - 0.1 / width,
            "top": 1 - 0.95 / height,
            "bottom": 0.45 / height,
            "hspace": 0.3,
            "wspace": 0.08,
        },
    )
    for row, (name, images) in enumerate(rows):
        for column in range(count):
            axes = grid[row, column]
            axes.imshow(images[column], interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if row == 0:
                axes.set_title(short(views.titles[column], 14), fontsize=10)
            if column == 0:
                axes.set_ylabel(name, fontsize=11)
            if row >= 2 and views.captions is not None:
                done = views.captions[column][row - 2].replace(", ", "\n")
                axes.set_xlabel(done, fontsize=7.5)
    side = views.side or views.original.shape[1]
    title: dict[str, Any] = {"ha": "center", "va": "top"}
    figure.text(
        0.5, 1 - 0.1 / height, f"Training views, {side} x {side} px", fontweight="bold", **title
    )
    if views.captions is not None:
        note = textwrap.fill(CAPTIONS, int(14 * width))
        figure.text(0.5, 1 - 0.32 / height, note, fontsize=9, **title)
    return figure
