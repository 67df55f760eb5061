"""Figures of a run, alone or beside a second one: `write_report`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpro_fast.errors import UserError, pip_line
from simpro_fast.report.runs import Run, kl_of_uniform, load_run, run_labels
from simpro_fast.utils.atomic_write import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with every kind of colour blindness; shape and hatch
# repeat the difference for print.
_TRUTH = "#7F7F7F"
_COLOURS = ("#0072B2", "#D55E00")
_LINES = ("-", "--")
_MARKERS = ("o", "s")
_HATCHES = ("", "//")
_BARS_UP_TO = 30
_CAPTIONS = (
    "Below strong views: the operations applied, in order, each with its level "
    "from 1 to 9 where it has one"
)
_STYLE = {
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "figure.dpi": 120,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.12,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class ViewsFigure:
    """A few training images with the views that the network sees, before normalisation."""

    original: np.ndarray
    """uint8 [n, H, W, 3]."""
    weak: np.ndarray
    """uint8 [n, H, W, 3]."""
    strong: np.ndarray
    """uint8 [n, V, H, W, 3]."""
    titles: Sequence[str]
    """n class names."""
    captions: Sequence[Sequence[str]] | None = None
    """[n][V]: what was done to each strong view, operations and levels, separated by a comma."""


def write_report(
    run_dir: Path,
    views: ViewsFigure | None = None,
    compare: Path | None = None,
    *,
    summary: dict[str, Any] | None = None,
) -> list[Path]:
    """Draw a finished run into `run_dir/report/`, two runs into `report/compare/` of the first.

    Args:
        run_dir: the run directory, with `summary.json` and `metrics.jsonl`.
        views: images for a sheet of weak and strong views.
        compare: a second run on the same split, drawn beside the first.
        summary: of the run, where it is not written yet.

    Returns:
        paths of the PNG files, in reading order.

    Raises:
        UserError: matplotlib is missing, a run is unfinished or damaged, or a figure cannot be
            written.
    """
    context = _import_matplotlib()
    runs = [load_run(run_dir, summary)] + ([load_run(compare)] if compare is not None else [])
    labels = run_labels(runs[0].summary, runs[1].summary if len(runs) > 1 else None)
    folder = run_dir / "report"
    if compare is not None:
        folder /= "compare"
    written = []
    with context(_STYLE):
        figures = {
            "prior.png": _prior(runs, labels),
            "kl.png": _kl(runs, labels),
            "accuracy.png": _accuracy(runs, labels),
            "pseudo_labels.png": _pseudo_labels(runs, labels),
            "per_class.png": _per_class(runs, labels),
            "views.png": None if views is None else _views(views),
        }
        for name, figure in figures.items():
            if figure is not None:
                with replacing(folder / name) as file:
                    figure.savefig(file, format="png")
                written.append(folder / name)
    return written


def _import_matplotlib() -> Any:
    """`matplotlib.rc_context`; the library is imported only where figures are wanted."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise UserError(f"figures need matplotlib: {pip_line('report')}") from None
    return rc_context


def _figure(width: float, height: float) -> Figure:
    # Without pyplot there is no global state and no display to ask for.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _prior(runs: Sequence[Run], labels: Sequence[str]) -> Figure:
    """The estimated class distribution of the unlabeled set at the end, and the true one."""
    summary = runs[0].summary
    truth = summary.get("pi_u_true")
    series = [] if truth is None else [("true", _TRUTH, "", np.asarray(truth))]
    for run, label, colour, hatch in zip(runs, labels, _COLOURS, _HATCHES, strict=False):
        kl = run.summary.get("kl_pi_u")
        note = "" if kl is None else f" (KL {kl:.3f} nats)"
        series.append((f"{label} estimate{note}", colour, hatch, np.asarray(run.summary["pi_u"])))
    figure = _figure(_class_width(summary, len(series)), 4.2)
    axes = figure.add_subplot()
    num_classes = len(summary["class_names"])
    if num_classes <= _BARS_UP_TO:
        _grouped_bars(axes, [(n, c, h, 100 * v) for n, c, h, v in series])
    else:
        # On a linear scale a hundred long-tailed classes would lie on the axis.
        lowest = min(float(value) for value in series[0][3] if value > 0)
        floor = 10 ** np.floor(np.log10(100 * lowest))
        shares = [(n, c, np.maximum(100 * v, floor)) for n, c, _, v in series]
        _class_lines(axes, shares, fill_first=truth is not None)
        axes.set_yscale("log")
        axes.set_ylim(bottom=floor)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.text(
            1.0, 1.0, f"shares below {floor:g} % are drawn there", transform=axes.transAxes,
            ha="right", va="bottom", fontsize=9,
        )  # fmt: skip
    _class_axis(axes, summary)
    axes.set_ylabel("share of the unlabeled set (%)")
    axes.set_title(f"{_title(runs, labels)}: class distribution of the unlabeled set")
    # Bars may fill the axes to the last corner.
    figure.legend(loc="outside lower center", ncols=len(series))
    return figure


def _kl(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    """How far the estimate is from the truth, over the training."""
    truth = runs[0].summary.get("pi_u_true")
    if truth is None:
        return None
    figure = _figure(8, 4.2)
    axes = figure.add_subplot()
    guess = kl_of_uniform(truth)
    _over_steps(axes, runs, labels, "kl_pi_u", 1.0, "{:.3f}")
    axes.axhline(guess, color=_TRUTH, linestyle=":", label=f"uniform guess ({guess:.3f})")
    axes.set_ylabel("KL(true || estimate) (nats)")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.set_title(f"{_title(runs, labels)}: distance of the estimate from the truth")
    axes.legend(loc="best")
    return figure


def _accuracy(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    if not any(len(run.series("top1")[0]) for run in runs):
        return None
    figure = _figure(8, 4.2)
    axes = figure.add_subplot()
    _over_steps(axes, runs, labels, "top1", 1.0, "{:.1f} %")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"{_title(runs, labels)}: accuracy of the averaged model")
    axes.legend(loc="lower right")
    return figure


def _pseudo_labels(runs: Sequence[Run], labels: Sequence[str]) -> Figure:
    """How many pseudo-labels pass the threshold, and how many of those are right, if known."""
    known = any(len(run.series("pseudo_label_accuracy")[0]) for run in runs)
    figure = _figure(11 if known else 8, 4.2)
    left, *right = figure.subplots(1, 1 + known, sharey=True, squeeze=False)[0]
    _over_steps(left, runs, labels, "mask_rate", 100.0, "{:.0f} %")
    left.set_title("kept: above the threshold")
    for axes in right:
        _over_steps(axes, runs, labels, "pseudo_label_accuracy", 1.0, "{:.0f} %")
        axes.set_title("right, of the kept ones")
    left.set_ylabel("pseudo-labels (%)")
    left.set_ylim(0, 103)
    left.legend(loc="best")
    figure.suptitle(f"{_title(runs, labels)}: pseudo-labels", fontweight="bold")
    return figure


def _per_class(runs: Sequence[Run], labels: Sequence[str]) -> Figure | None:
    """Accuracy of each class at the end."""
    known = [(run, label) for run, label in zip(runs, labels, strict=True) if _has_accuracy(run)]
    if not known:
        return None
    summary = runs[0].summary
    series = []
    for (run, label), colour, hatch in zip(known, _COLOURS, _HATCHES, strict=False):
        values = np.array([np.nan if v is None else v for v in run.summary["per_class"]])
        series.append((f"{label} (mean {np.nanmean(values):.1f} %)", colour, hatch, values))
    figure = _figure(_class_width(summary, len(series)), 4.4)
    axes = figure.add_subplot()
    if len(summary["class_names"]) <= _BARS_UP_TO:
        _grouped_bars(axes, series)
    else:
        _class_lines(axes, [(n, c, v) for n, c, _, v in series], fill_first=False)
    _class_axis(axes, summary, counts=True)
    axes.set_ylim(0, 100)
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"{_title(runs, labels)}: accuracy of each class", pad=28)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def _views(views: ViewsFigure) -> Figure:
    """Images as columns, views as rows."""
    count, num_strong = views.strong.shape[:2]
    rows = [("original", views.original), ("weak", views.weak)]
    rows += [(f"strong {v + 1}", views.strong[:, v]) for v in range(num_strong)]
    width, height = 1.35 * count + 0.8, 1.75 * len(rows) + 1.0
    figure = _figure(width, height)
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
                axes.set_title(_short(views.titles[column], 14), fontsize=10)
            if column == 0:
                axes.set_ylabel(name, fontsize=11)
            if row >= 2 and views.captions is not None:
                done = views.captions[column][row - 2].replace(", ", "\n")
                axes.set_xlabel(done, fontsize=7.5)
    side = views.original.shape[1]
    title: dict[str, Any] = {"ha": "center", "va": "top"}
    figure.text(
        0.5, 1 - 0.1 / height, f"Training views, {side} x {side} px", fontweight="bold", **title
    )
    if views.captions is not None:
        note = textwrap.fill(_CAPTIONS, int(14 * width))
        figure.text(0.5, 1 - 0.32 / height, note, fontsize=9, **title)
    return figure


def _over_steps(
    axes: Axes, runs: Sequence[Run], labels: Sequence[str], key: str, scale: float, ending: str
) -> None:
    """One line per run, with its last value written at its end."""
    ends = []
    for run, label, colour, line, marker in zip(
        runs, labels, _COLOURS, _LINES, _MARKERS, strict=False
    ):
        steps, values = run.series(key)
        if not len(steps):
            continue
        few = marker if len(steps) <= 30 else None
        axes.plot(
            steps, scale * values, line, color=colour, label=label, marker=few, markersize=4, lw=1.8
        )
        ends.append((scale * float(values[-1]), int(steps[-1]), colour))
    low, high = axes.get_ylim()
    close = len(ends) == 2 and abs(ends[0][0] - ends[1][0]) < 0.08 * (high - low)
    for index, (value, step, colour) in enumerate(sorted(ends)):
        # Two ends close together would print over each other: push them apart.
        shift = (-7, 7)[index] if close else 0
        axes.annotate(
            ending.format(value),
            (step, value),
            xytext=(7, shift),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )
    axes.set_xlabel("step")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.02)


Series = tuple[str, str, str, np.ndarray]


def _grouped_bars(axes: Axes, series: Sequence[Series]) -> None:
    width = 0.8 / len(series)
    for index, (name, colour, hatch, values) in enumerate(series):
        positions = np.arange(len(values)) + (index - (len(series) - 1) / 2) * width
        bars = axes.bar(positions, values, width * 0.94, color=colour, label=name)
        for bar in bars:
            bar.set(hatch=hatch, edgecolor="white", linewidth=0)


def _class_lines(
    axes: Axes, series: Sequence[tuple[str, str, np.ndarray]], *, fill_first: bool
) -> None:
    """For more classes than bars can show: a shape for the truth, points for the runs."""
    rest = list(series)
    if fill_first:
        name, colour, values = rest.pop(0)
        axes.fill_between(
            np.arange(len(values)), values, step="mid", color=colour, alpha=0.45, lw=0, label=name
        )
    for (name, colour, values), marker, line in zip(rest, _MARKERS, _LINES, strict=False):
        axes.plot(
            values, line, color=colour, marker=marker, markersize=4, lw=0.8, label=name, alpha=0.9
        )


def _class_axis(axes: Axes, summary: dict[str, Any], *, counts: bool = False) -> None:
    """Names under the bars; for many classes the index. With `counts` the labeled images too."""
    names = [_short(str(name), 12) for name in summary["class_names"]]
    labeled = summary["labeled_counts"]
    if len(names) <= _BARS_UP_TO:
        texts = [f"{n}\n{c:,}" if counts else n for n, c in zip(names, labeled, strict=True)]
        slanted = max(map(len, names)) * len(names) > 110
        axes.set_xticks(
            range(len(names)),
            texts,
            rotation=40 if slanted else 0,
            ha="right" if slanted else "center",
            rotation_mode="anchor" if slanted else "default",
        )
        axes.set_xlabel("class, with its labeled images" if counts else "class")
    else:
        step = 10 if len(names) <= 200 else 10 ** (len(str(len(names))) - 1) // 5
        ticks = list(range(0, len(names), step))
        texts = [f"{k}\n{labeled[k]:,}" if counts else f"{k}" for k in ticks]
        axes.set_xticks(ticks, texts)
        axes.set_xlabel("class index, with its labeled images" if counts else "class index")
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.01)


def _class_width(summary: dict[str, Any], num_series: int) -> float:
    """Figure width in inches that leaves room for every bar."""
    count = len(summary["class_names"])
    return min(14.0, max(8.0, 2 + count * (0.35 + 0.22 * num_series)))


def _has_accuracy(run: Run) -> bool:
    return any(value is not None for value in run.summary.get("per_class") or [])


def _title(runs: Sequence[Run], labels: Sequence[str]) -> str:
    name = runs[0].summary["name"]
    return f"{name}, {labels[0]}" if len(runs) == 1 else f"{name}, {labels[0]} and {labels[1]}"


def _short(name: str, limit: int) -> str:
    return name if len(name) <= limit else f"{name[: limit - 2]}.."
