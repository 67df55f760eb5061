"""Reports on runs: tables for the terminal, figures, and one page to send around."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpro_fast.answers.report.figures import draw_figures
from simpro_fast.answers.report.groups import Group
from simpro_fast.answers.report.page import PAGE, write_page
from simpro_fast.answers.report.pictures import TrainingViews, pictures_of
from simpro_fast.answers.report.terminal import print_report, print_summary

__all__ = ["TrainingViews", "print_report", "print_summary", "write_report"]


def write_report(groups: Sequence[Group], folder: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Draw runs into `folder`: PNG files, and `report.html` with everything in it.

    Args:
        groups: of runs that may be compared, see `check_same_split`.
        notes: what must be said before it.

    Returns:
        paths of the files, the page last.

    Raises:
        UserError: matplotlib or jinja2 is missing, a run is damaged, or a file cannot be written.
    """
    views, mistakes, texts = zip(*(pictures_of(group.runs[0]) for group in groups), strict=True)
    figures = draw_figures(groups, folder)
    said = [*notes, *(text for one in texts for text in one)]
    page = folder / PAGE
    write_page(page, groups, figures, list(zip(views, mistakes, strict=True)), said)
    return [*figures.paths, page]
