"""The terminal table and the figures, from small run directories."""

from __future__ import annotations

import builtins
import io
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from simpro_fast.cli.report import main
from simpro_fast.errors import UserError
from simpro_fast.report import ViewsFigure, print_summary, write_report
from simpro_fast.report.runs import kl_of_uniform, load_run, read_metrics, run_labels


def make_summary(num_classes: int = 4, method: str = "simpro", **values: Any) -> dict[str, Any]:
    counts = np.array([100 * 2**k for k in range(num_classes)], dtype=object)
    truth = [float(c / counts.sum()) for c in counts]
    estimate = truth[::-1] if method == "fixmatch" else truth
    summary = {
        "name": "toy_lt/reversed",
        "seed": 1,
        "method": method,
        "steps": 1200,
        "top1": 81.25,
        "top1_class_mean": 80.5,
        "top1_mean_last20": 79.0,
        "top1_best": 82.0,
        "per_class": [90.0 - k for k in range(num_classes)],
        "class_names": [f"name{k}" for k in range(num_classes)],
        "many": 88.0,
        "medium": 77.5,
        "few": None,
        "kl_pi_u": 0.0625,
        "pi_u": estimate,
        "pi_u_true": truth,
        "labeled_counts": [150 - k for k in range(num_classes)],
        "unlabeled_counts": [int(c) for c in counts],
        "seconds": 51.4,
        "images_per_second": 6400.3,
        "commit": "0123456",
        "machine": "2 cores",
    }
    return summary | values


def write_run(path: Path, summary: dict[str, Any], periods: int = 6, **row: Any) -> Path:
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(summary))
    rows = [
        {
            "step": 200 * (i + 1),
            "period": i + 1,
            "mask_rate": 0.1 * i,
            "pseudo_label_accuracy": 90.0 - i,
            "kl_pi_u": 1.0 / (i + 1),
            "top1": 50.0 + i if i % 2 else None,
        }
        | row
        for i in range(periods)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def printed(*args: Any, **kwargs: Any) -> str:
    out = io.StringIO()
    print_summary(*args, **kwargs, file=out)
    return out.getvalue()


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


# Terminal


def test_accuracies_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = printed(make_summary())
    assert text.startswith("toy_lt/reversed: SimPro, seed 1, 1,200 steps in 51 s, 6,400 images/s\n")
    assert row_of(text, "overall").split()[-1] == "81.2"
    assert row_of(text, "many").split()[-1] == "88.0"
    assert row_of(text, "few").split()[-1] == "-"
    assert row_of(text, "name0").split() == ["name0", "150", "90.0"]
    assert "SimPro 0.062" in text
    assert f"(a uniform guess: {kl_of_uniform(make_summary()['pi_u_true']):.3f})" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\033" not in text


def bars(text: str) -> dict[str, str]:
    lines = text[text.index("unlabeled set") :].splitlines()[1:-1]
    return {line.split()[0]: line.rpartition("% ")[2] for line in lines}


def test_bars_show_estimate_and_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summary = make_summary(pi_u=[0.4, 0.2, 0.3, 0.1], pi_u_true=[0.1, 0.2, 0.3, 0.4])
    drawn = bars(printed(summary))
    # The largest share is the full width of 40; the mark is the last cell of the true share.
    assert drawn["name0"] == "\u2588" * 9 + "\u2502" + "\u2588" * 30
    assert drawn["name1"] == "\u2588" * 19 + "\u2502"
    assert drawn["name3"] == "\u2588" * 10 + " " * 29 + "\u2502"
    text = printed(summary)
    assert row_of(text[text.index("unlabeled set") :], "name0").split()[:6] == [
        *("name0", "100", "10.0", "%", "40.0", "%")
    ]


def test_two_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    text = printed(make_summary(), compare=make_summary(method="fixmatch", top1=60.0))
    assert row_of(text, "overall").split() == ["overall", "81.2", "60.0"]
    assert row_of(text, "name1").split() == ["name1", "149", "89.0", "89.0"]
    assert "SimPro 0.062, FixMatch 0.062" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_hundred_classes_are_grouped() -> None:
    per_class = [float(k) for k in range(100)]
    text = printed(make_summary(100, per_class=per_class))
    assert row_of(text, "0-4").split() == ["0-4", str(150 + 149 + 148 + 147 + 146), "2.0"]
    assert row_of(text, "95-99").split()[-1] == "97.0"
    assert len(text.splitlines()) < 60


def test_unknown_truth_and_no_test_set() -> None:
    summary = make_summary(
        top1=None, top1_best=None, per_class=[None] * 4, pi_u_true=None, kl_pi_u=None,
        unlabeled_counts=None, many=None, medium=None,
    )  # fmt: skip
    text = printed(summary)
    assert row_of(text, "overall").split()[-1] == "-"
    assert row_of(text, "name2").split() == ["name2", "148", "-"]
    assert "truth" not in text
    assert "\u2502" not in text


class Terminal(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_escape_codes_and_glyphs_follow_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_summary(make_summary(), file=out)
    assert "\033[1m" in out.getvalue()
    assert "####" in out.getvalue()
    out.getvalue().encode("ascii")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    print_summary(make_summary(), file=plain)
    assert "\033" not in plain.getvalue()
    strip = re.compile(r"\033\[\d*m")
    assert strip.sub("", out.getvalue()) == plain.getvalue()


# Reading runs


def test_labels_tell_runs_apart() -> None:
    first = make_summary()
    assert run_labels(first, None) == ["SimPro"]
    assert run_labels(first, make_summary(method="fixmatch")) == ["SimPro", "FixMatch"]
    assert run_labels(first, make_summary(name="other")) == ["toy_lt/reversed", "other"]
    assert run_labels(first, make_summary(seed=2))[1] == "toy_lt/reversed seed 2"
    assert len(set(run_labels(first, make_summary()))) == 2


def test_kl_of_uniform() -> None:
    assert kl_of_uniform([0.25] * 4) == pytest.approx(0.0)
    expected = 0.5 * np.log(1.5) + 0.5 * np.log(1.5)
    assert kl_of_uniform([0.5, 0.5, 0.0]) == pytest.approx(expected)


def test_metrics_of_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_metrics(path)


def test_series_leaves_out_null(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", make_summary()))
    steps, values = run.series("top1")
    assert steps.tolist() == [400, 800, 1200]
    assert values.tolist() == [51.0, 53.0, 55.0]
    assert run.series("nothing")[0].shape == (0,)


def test_what_is_no_finished_run_is_told_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = tmp_path / "toy_lt" / "reversed" / "seed1"
    seed.mkdir(parents=True)
    (seed / "config.yaml").touch()
    for arguments, code, told in (
        ([], 2, "no run directory; for example"),
        ([str(tmp_path / "nowhere")], 1, "nowhere: no such folder"),
        ([str(seed.parent)], 1, f"take one of {seed}"),
        ([str(tmp_path)], 1, f"take one of {seed}"),
        ([str(seed)], 1, "not finished; start its training command again"),
    ):
        assert main(arguments) == code
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and shown.count("\n") == 1
        assert told in shown


def test_unfinished_and_damaged_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither summary"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        write_report(tmp_path)
    for text in ("{}", "[]", '{"steps": 3}'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(UserError, match=r"summary\.json is damaged .*missing"):
            write_report(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(make_summary(4)))
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        write_report(tmp_path)


# Figures


def make_views(count: int = 3, num_strong: int = 2) -> ViewsFigure:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return ViewsFigure(
        original=images,
        weak=images,
        strong=np.stack([images] * num_strong, axis=1),
        titles=[f"name{k}" for k in range(count)],
        captions=[["rotate 3, solarize 200"] * num_strong] * count,
    )


@pytest.mark.filterwarnings("error")  # matplotlib warns where a layout does not fit
@pytest.mark.parametrize("num_classes", [4, 40])
def test_all_figures_are_written(tmp_path: Path, num_classes: int) -> None:
    run = write_run(tmp_path / "a", make_summary(num_classes))
    other = write_run(tmp_path / "b", make_summary(num_classes, "fixmatch"))
    own = write_report(run)
    before = [path.read_bytes() for path in own]
    paths = write_report(run, make_views(), other)
    assert [path.read_bytes() for path in own] == before, "a run's own figures stay"
    assert [path.name for path in paths] == [
        *("prior.png", "kl.png", "accuracy.png", "pseudo_labels.png", "per_class.png", "views.png")
    ]
    for path in paths:
        assert path.parent == run / "report/compare"
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert 500 <= width <= 2000 and 400 <= height <= 1500


def test_what_is_unknown_is_not_drawn(tmp_path: Path) -> None:
    summary = make_summary(per_class=[None] * 4, top1=None, pi_u_true=None, kl_pi_u=None)
    run = write_run(tmp_path / "a", summary, top1=None, kl_pi_u=None, pseudo_label_accuracy=None)
    assert [path.name for path in write_report(run)] == ["prior.png", "pseudo_labels.png"]


Draw = Callable[..., "dict[str, Figure]"]


@pytest.fixture
def draw(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """What `write_report` saves of runs with these summaries: figures by the names of files."""
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, file: IO[bytes], **options: Any) -> None:
        figure.draw_without_rendering()
        # The temporary file of prior.png is .prior.png.<random>.tmp.
        drawn[".".join(Path(file.name).name.split(".")[1:3])] = figure

    def run(*summaries: dict[str, Any], **row: Any) -> dict[str, Figure]:
        monkeypatch.setattr(Figure, "savefig", keep)
        first, *other = [
            write_run(tmp_path_factory.mktemp("run") / "seed1", summary, **row)
            for summary in summaries
        ]
        write_report(first, None, *other)
        return drawn

    return run


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
    assert len(labels) >= 10
    slanted = labels[0].get_rotation() != 0
    boxes = [label.get_window_extent() for label in labels]
    for left, right in pairwise(boxes):
        # Slanted labels end at their tick, so it is enough that the ends keep a line's distance.
        gap = right.x1 - left.x1 if slanted else right.x0 - left.x1
        assert gap > (15 if slanted else 2)


def test_ends_of_equal_lines_are_both_readable(draw: Draw) -> None:
    figure = draw(*two_summaries())["accuracy.png"]
    first, second = (text.get_window_extent() for text in figure.axes[0].texts)
    assert first.y1 <= second.y0 + 4 or second.y1 <= first.y0 + 4


def test_missing_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(UserError, match=r"pip install -e '\.\[report\]'") as caught:
        write_report(write_run(tmp_path / "a", make_summary()))
    assert "log.figures" not in str(caught.value), "report.py has no such key"
