"""What the figures show."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from simpro_fast.answers import report
from simpro_fast.answers.report import figures
from simpro_fast.answers.report.groups import group_runs
from simpro_fast.answers.report.pictures import FOLDER, TrainingViews, load_views, save_views
from simpro_fast.answers.report.runs import load_run
from simpro_fast.answers.report.verb_figures import (
    confusion_figure,
    reliability_figure,
    shares_figure,
)
from simpro_fast.utils.errors import UserError
from tests.answers.report.made_runs import make_run
from tests.answers.report.small_runs import make_summary, write_run


def write_report(*runs: Path, folder: str = FOLDER) -> list[Path]:
    return report.write_report(group_runs([load_run(run) for run in runs]), runs[0] / folder)


def make_views(count: int = 3, num_strong: int = 2) -> TrainingViews:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return TrainingViews(
        original=images,
        weak=images,
        strong=np.stack([images] * num_strong, axis=1),
        titles=[f"name{k}" for k in range(count)],
        captions=[["rotate 3, solarize 200"] * num_strong] * count,
    )


@pytest.mark.filterwarnings("error")  # matplotlib warns where a layout does not fit
@pytest.mark.parametrize("num_classes", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_all_figures_are_written(tmp_path: Path, num_classes: int) -> None:
    run = write_run(tmp_path / "a", make_summary(num_classes))
    save_views(make_views(), run / FOLDER)
    own = write_report(run)
    names = ["prior.png", "kl.png", "accuracy.png", "pseudo_labels.png", "per_class.png"]
    assert [path.name for path in own] == [*names, "report.html"]
    before = [path.read_bytes() for path in own]
    other = write_run(tmp_path / "b", make_summary(num_classes, "fixmatch"))
    paths = write_report(run, other, folder="report/compare")
    assert [path.read_bytes() for path in own] == before, "a run's own figures stay"
    assert paths == [run / "report/compare" / name for name in (*names, "report.html")]
    for path in [*own[:-1], *paths[:-1]]:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert 500 <= width <= 2000 and 400 <= height <= 1500


def test_a_dollar_in_a_name_is_a_dollar(tmp_path: Path) -> None:
    """matplotlib takes what stands between two of them for a formula."""
    names = ["$\\frac$", "a$b^$c", "d"]
    bins = [{"count": 3, "confidence": 0.6, "accuracy": 0.5}]
    columns = ("estimate", "low", "high", "pi_u", "em", "em_calibrated", "mean_posterior")
    shares = dict.fromkeys(columns, 0.3)
    shares = {"images": 9, "unseen": 3, "rows": [{"class": name, **shares} for name in names]}
    confusion_figure(np.eye(3, dtype=int).tolist(), names, tmp_path / "confusion.png")
    reliability_figure({"$^$": {"reliability": bins, "ece": 0.1}}, tmp_path / "reliability.png")
    shares_figure(shares, tmp_path / "shares.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    run = make_run(tmp_path / "run", class_names=names, shares=True, evaluated=True, pictures=True)
    assert len(write_report(run)) > 8


def test_all_figures_are_made_in_one_style() -> None:
    """The one that says so of dollars; a figure of another module would begin without it."""
    package = Path(report.__file__).parents[1]
    made = [
        path for path in package.rglob("*.py") if re.search(r"\bFigure\(|pyplot", path.read_text())
    ]
    assert made == [package / "report/figures/style.py"]


def test_pictures_are_kept_as_they_were_and_damaged_ones_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", make_summary())
    views = make_views()
    save_views(views, run / FOLDER)
    found = load_views(run / FOLDER)
    assert found is not None and found.titles == views.titles and found.captions == views.captions
    for name in ("original", "weak", "strong"):
        assert np.array_equal(getattr(found, name), getattr(views, name))
    path = run / FOLDER / "views.npz"
    path.write_bytes(b"PK")
    (*_, page) = write_report(run)
    assert "views.npz is damaged" in page.read_text()


Draw = Callable[..., "dict[str, Figure]"]


@pytest.fixture
def draw(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """What is drawn of runs with these summaries: figures by the names of files."""
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> None:
        figure.draw_without_rendering()
        drawn[path.name] = figure

    def run(*summaries: dict[str, Any] | Path, **row: Any) -> dict[str, Figure]:
        monkeypatch.setattr(figures, "save_png", keep)
        monkeypatch.setattr(figures, "svg_uri", lambda figure: "data:,")
        paths = [
            summary
            if isinstance(summary, Path)
            else write_run(tmp_path_factory.mktemp("run") / "seed1", summary, **row)
            for summary in summaries
        ]
        made = figures.draw_figures(group_runs([load_run(path) for path in paths]), Path())
        assert [path.name for path in made.paths] == list(drawn)
        return drawn

    return run


def test_runs_of_other_labels_are_drawn_in_one_order_of_classes(draw: Draw) -> None:
    names = {"class_names": ["a", "b"], "confusion": [[3, 1], [0, 4]], "per_class": [75.0, 100.0]}
    shares = {"pi_u": [0.5, 0.5], "pi_u_true": None, "unlabeled_counts": None}
    runs = [
        make_summary(2, name=name, labeled_counts=counts, **names, **shares)
        for name, counts in (("first", [5, 10]), ("second", [20, 10]))
    ]
    drawn = draw(*runs)
    for number in (1, 2):
        ticks = drawn[f"confusion_{number}.png"].axes[0].get_yticklabels()
        assert [tick.get_text() for tick in ticks] == ["b", "a"]


def test_what_is_unknown_is_not_drawn(draw: Draw) -> None:
    summary = make_summary(per_class=[None] * 4, top1=None, pi_u_true=None, kl_pi_u=None)
    drawn = draw(summary, top1=None, kl_pi_u=None, pseudo_label_accuracy=None)
    assert list(drawn) == ["prior.png", "pseudo_labels.png"]


def two_summaries(num_classes: int = 4, **values: Any) -> list[dict[str, Any]]:
    return [make_summary(num_classes, method, **values) for method in ("simpro", "fixmatch")]


def test_no_empty_axes_where_the_truth_is_unknown(draw: Draw) -> None:
    assert len(draw(make_summary())["pseudo_labels.png"].axes) == 2
    unknown = draw(make_summary(name="other"), pseudo_label_accuracy=None)
    assert len(unknown["pseudo_labels.png"].axes) == 1


def test_no_legend_lies_on_equal_bars(draw: Draw) -> None:
    figure = draw(make_summary(4, pi_u=[0.25] * 4, pi_u_true=None))["prior.png"]
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= figure.axes[0].get_window_extent().y0


def test_bars_have_the_heights_of_the_summary(draw: Draw) -> None:
    ours, other = two_summaries()
    figures = draw(ours, other)
    bars = figures["prior.png"].axes[0].containers
    shares = [[bar.get_height() for bar in group] for group in bars]
    expected = np.array([ours["pi_u_true"], ours["pi_u"], other["pi_u"]])
    assert shares == pytest.approx(expected * 100)
    bars = figures["per_class.png"].axes[0].containers
    assert [bar.get_height() for bar in bars[1]] == other["per_class"]


def test_lines_have_the_values_of_the_metrics(draw: Draw) -> None:
    figures = draw(*two_summaries())
    axes = figures["kl.png"].axes[0]
    assert axes.lines[0].get_xdata().tolist() == [200, 400, 600, 800, 1000, 1200]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([1 / n for n in range(1, 7)])
    assert axes.get_ylim()[1] >= 1.0, "the largest value must be inside the picture"
    kept, right = figures["pseudo_labels.png"].axes
    assert right.lines[0].get_ydata().tolist() == [90.0, 89.0, 88.0, 87.0, 86.0, 85.0]
    assert kept.lines[1].get_ydata().tolist() == pytest.approx([0, 10, 20, 30, 40, 50])
    (tested,) = {tuple(line.get_ydata()) for line in figures["accuracy.png"].axes[0].lines}
    assert tested == (51.0, 53.0, 55.0)


LONG = [f"rather long class name {k}" for k in range(25)]


@pytest.mark.parametrize("names", [None, LONG], ids=["100 classes", "25 long names"])
@pytest.mark.parametrize("file", ["prior.png", "per_class.png"])
def test_class_labels_do_not_overlap(draw: Draw, names: list[str] | None, file: str) -> None:
    values = {} if names is None else {"class_names": names}
    figure = draw(*two_summaries(100 if names is None else len(names), **values))[file]
    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert len(labels) >= 5
    slanted = labels[0].get_rotation() != 0
    boxes = [label.get_window_extent() for label in labels]
    for left, right in pairwise(boxes):
        # Slanted labels end at their tick, so it is enough that the ends keep a line's distance.
        gap = right.x1 - left.x1 if slanted else right.x0 - left.x1
        assert gap > (10 if slanted else 2)


def test_ten_experiments_are_told_apart(draw: Draw, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"x{k}/seed1", name=f"toy/tau_{k}", level=-0.1 * k) for k in range(10)
    ]
    drawn = draw(*runs)
    for name in ("accuracy.png", "kl.png", "pseudo_labels.png"):
        lines = drawn[name].axes[0].lines[:10]
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
        assert len(looks) == 10
        (legend,) = drawn[name].legends
        assert legend.get_window_extent().y1 <= drawn[name].axes[-1].get_window_extent().y0
        assert drawn[name].axes[0].get_window_extent().height > 150
    bars = [group[0] for group in drawn["per_class.png"].axes[0].containers]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 10


def test_classes_are_in_the_order_of_their_labeled_images(draw: Draw, tmp_path: Path) -> None:
    counts, shares = [5, 40, 20, 40], [0.1, 0.2, 0.3, 0.4]
    row = {"per_class": [1.0, None, 3.0, 4.0], "mask_rate_per_class": [0.1, 0.2, None, 0.4]}
    drawn = draw(make_summary(labeled_counts=counts, pi_u=shares, pi_u_true=None), **row)
    bars = [bar.get_height() for bar in drawn["prior.png"].axes[0].containers[0]]
    assert bars == pytest.approx([20, 40, 30, 10])
    assert drawn["prior.png"].axes[0].get_xlabel() == "class (most labeled first)"
    panels = drawn["classes_over_time.png"].axes
    accuracy, kept = (axes.collections[0].get_array() for axes in panels[:2])
    assert accuracy.shape == kept.shape == (4, 6)
    assert accuracy[:, 0].filled(-1).tolist() == [-1, 4, 3, 1]
    assert kept[:, 5].filled(-1).tolist() == pytest.approx([20, 40, -1, 10])


def test_intervals_and_evaluations_are_drawn_where_a_run_has_them(
    draw: Draw, tmp_path: Path
) -> None:
    path = make_run(tmp_path / "seed1", shares=True, evaluated=True)
    summary = json.loads((path / "summary.json").read_text())
    drawn = draw(path)
    (errors,) = (c for c in drawn["prior.png"].axes[0].containers if hasattr(c, "has_yerr"))
    (segments,) = (lines.get_segments() for lines in vars(errors)["lines"][2])
    rows = summary["shares"]["rows"]
    assert [segment[:, 1].tolist() for segment in segments] == [
        pytest.approx([100 * row["low"], 100 * row["high"]]) for row in rows
    ]
    marks = drawn["prior.png"].axes[0].lines[-1]
    assert sorted(marks.get_ydata()) == pytest.approx(sorted(100 * p for p in summary["pi_u"]))
    shares = drawn["confusion.png"].axes[0].images[0].get_array()
    counts = np.array(summary["confusion"])
    np.testing.assert_allclose(shares, 100 * counts / counts.sum(axis=1, keepdims=True))
    points = drawn["reliability.png"].axes[0].lines[1]
    bins = [b for b in summary["reliability"]["bins"] if b["count"]]
    assert points.get_xdata() == pytest.approx([100 * b["confidence"] for b in bins])
    assert points.get_ydata() == pytest.approx([100 * b["accuracy"] for b in bins])


def test_missing_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"`pip install 'matplotlib>=3\.8' ") as caught:
        write_report(write_run(tmp_path / "a", make_summary()))
    assert "log.figures" not in str(caught.value), "report.py has no such key"
