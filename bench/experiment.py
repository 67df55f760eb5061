"""An experiment on the CPU: every method under five unlabeled distributions.

    python bench/experiment.py fashion_mnist_lt                     # all cells; skips finished runs
    python bench/experiment.py fashion_mnist_lt --only reversed     # one row of the table
    python bench/experiment.py digits_lt --only reversed --seeds 1 2 3
    python bench/experiment.py fashion_mnist_lt --image-size 14     # a quarter of the pixels
    python bench/experiment.py fashion_mnist_lt --balanced          # class-balanced labeled batches
    python bench/experiment.py fashion_mnist_lt --commit            # git commit after every run
    python bench/experiment.py fashion_mnist_lt --method simpro --threads 1    # beside another one

Each run is a member of a sweep and takes at most five minutes on two free cores. An interrupted run
goes on from its checkpoint. Results are in bench/results/<set>.csv (one line per run), .md (table)
and .png (figure); of other sizes in <set>_14px.*; with --balanced, which samples labeled images
class by class for 400 steps, in <set>_balanced.*.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from simpro_fast.answers.evaluation import kl_divergence
from simpro_fast.answers.report.runs import METHOD_TITLES
from simpro_fast.answers.report.tables import NUMBERS, markdown
from simpro_fast.cli.members import train_members
from simpro_fast.cli.sweep import Member, members_of
from simpro_fast.config.methods import METHODS as REGISTERED
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.file_lock import locked

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DISTRIBUTIONS = ("consistent", "uniform", "reversed", "middle", "head_tail")
LAUNCHER = (sys.executable, "launch/train.py")
BALANCED = ["data.sampling=class_balanced", "train.steps=400"]
METHODS = {name: METHOD_TITLES.get(name, name) for name in REGISTERED}
Cell = tuple[str, str, int]
"""Distribution, method, seed."""
FIELDS = (
    "distribution",
    "method",
    "seed",
    "steps",
    "top1",
    "top1_mean_last20",
    "kl_pi_u",
    "kl_uniform",
    "seconds",
    "images_per_second",
    "threads",
    "torch",
    "dali",
    "deepspeed",
    "commit",
    "machine",
)


def members(
    dataset: str, cells: Sequence[Cell], threads: int | None, kind: str, changes: Sequence[str]
) -> dict[Cell, Member]:
    """The run of each cell of the table.

    Args:
        kind: added to the names of the runs. changes: keys of the configuration, `a.b=value`.
    """
    overrides = ["log.progress=off", "log.figures=false", "log.tensorboard=false", *changes]
    if threads:
        overrides += [f"train.threads={threads}", f"train.data_threads={threads}"]
    found = {}
    for distribution, method, seed in cells:
        name = f"name={dataset}/{distribution}{kind}"
        grid, config = [f"method.name={method}"], f"{dataset}/{distribution}"
        (found[distribution, method, seed],) = members_of(
            config, grid, str(seed), [name, *overrides]
        )
    return found


def row(distribution: str, folder: Path) -> dict[str, Any]:
    """One line of the results, from the files of a finished run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    versions = environment["versions"]
    classes = len(summary["class_names"])
    found = {
        **summary,
        "distribution": distribution,
        "kl_uniform": kl_divergence(summary["unlabeled_counts"], [1 / classes] * classes),
        "threads": environment["torch_threads"],
        "torch": versions["torch"],
        "dali": versions.get("nvidia-dali-cuda130"),
        "deepspeed": versions.get("deepspeed"),
    }
    digits = {"top1": 2, "top1_mean_last20": 2, "kl_pi_u": 4, "kl_uniform": 4, "seconds": 1}
    for key, places in {**digits, "images_per_second": 0}.items():
        found[key] = round(found[key], places)
    return {key: found[key] for key in FIELDS}


def read_rows(dataset: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{dataset}.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add_row(dataset: str, new: dict[str, Any]) -> None:
    """Add one run to the results and draw them again; several runners may work at once."""
    with locked(RESULTS, "check its permissions", folder=True):
        rows = [*read_rows(dataset), new]
        rows.sort(
            key=lambda r: (DISTRIBUTIONS.index(r["distribution"]), r["method"], int(r["seed"]))
        )
        write_rows(dataset, rows)
        draw(dataset, rows)


def write_rows(dataset: str, rows: list[dict[str, Any]]) -> None:
    write_csv(dataset, FIELDS, rows)
    write_atomically(RESULTS / f"{dataset}.md", table(rows))


def write_csv(name: str, fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """bench/results/<name>.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(RESULTS / f"{name}.csv", text.getvalue())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: top-1 of the last EMA weights, and the distance of the prior, over seeds."""
    done = [d for d in DISTRIBUTIONS if any(r["distribution"] == d for r in rows)]
    seeds = sorted({str(r["seed"]) for r in rows})
    tables = []
    for key in ("top1", "kl_pi_u"):
        shown = {
            title: [_values(rows, d, method, key) for d in done]
            for method, title in _used(rows).items()
        }
        if key == "kl_pi_u":
            levels = (_values(rows, d, "simpro", "kl_uniform")[:1] for d in done)
            shown["uniform guess"] = list(levels)
        title, digits = NUMBERS[key]
        header = [title, *done, *(["mean"] if len(done) > 1 else [])]
        lines = []
        for name, cells in shown.items():
            wanted = 1 if name == "uniform guess" else len(seeds)
            line = [name, *(_cell(values, digits, wanted) for values in cells)]
            if len(done) > 1:
                line.append(f"{fmean(map(fmean, cells)):.{digits}f}" if all(cells) else "-")
            lines.append(line)
        tables.append(markdown(header, lines))
    note = f"Seeds {', '.join(seeds)}; of the last EMA weights on the test set.\n"
    return "\n".join([*tables, note])


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, and the standard deviation of more than one value."""
    text = f"{fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {stdev(values):.{digits}f}"


def _cell(values: Sequence[float], digits: int, seeds: int) -> str:
    """Mean, deviation, and the number of seeds where some are missing."""
    if not values:
        return "-"
    missing = f" ({len(values)} of {seeds} seeds)" if len(values) < seeds else ""
    return spread(values, digits) + missing


def _used(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Titles of the methods that have results."""
    return {m: title for m, title in METHODS.items() if any(r["method"] == m for r in rows)}


def _values(rows: list[dict[str, Any]], distribution: str, method: str, key: str) -> list[float]:
    cell = (distribution, method)
    return [float(r[key]) for r in rows if (r["distribution"], r["method"]) == cell]


def _mean(rows: list[dict[str, Any]], distribution: str, method: str, key: str) -> float | None:
    values = _values(rows, distribution, method, key)
    return sum(values) / len(values) if values else None


def draw(dataset: str, rows: list[dict[str, Any]]) -> Path:
    """Two panels: accuracy, and distance of the estimated prior, by distribution."""
    shown = [d for d in DISTRIBUTIONS if any(r["distribution"] == d for r in rows)]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    used = _used(rows)
    many = len(used) > 3  # their numbers and names would print over each other
    size = (15, 6) if many else (13, 4.5)
    figure, panels = plt.subplots(1, 2, figsize=size, constrained_layout=True)
    width, colours = 0.8 / len(used), plt.get_cmap("tab20")
    for panel, key, label, form in (
        (panels[0], "top1", "top-1 accuracy (%)", "%.1f"),
        (panels[1], "kl_pi_u", "KL(true || estimate) of the unlabeled prior (nats)", "%.2f"),
    ):
        for i, (method, title) in enumerate(used.items()):
            values = [_mean(rows, d, method, key) or 0.0 for d in shown]
            places = [x + (i - (len(used) - 1) / 2) * width for x in range(len(shown))]
            bars = panel.bar(places, values, width, label=title, color=colours(i))
            if not many:
                panel.bar_label(bars, fmt=form, fontsize=8, padding=1)
        if key == "kl_pi_u":
            for x, name in enumerate(shown):
                level = _mean(rows, name, "simpro", "kl_uniform")
                if level is not None:
                    label_once = "uniform guess" if x == 0 else None
                    panel.hlines(level, x - 0.45, x + 0.45, "#444444", "--", label=label_once)
        panel.set_xticks(range(len(shown)), [d.replace("_", "-") for d in shown])
        panel.set_ylabel(label)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.12)
        if not many:
            panel.legend(frameon=False, fontsize=8, ncols=2)
    if many:
        handles, labels = panels[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    panels[0].set_title(f"{dataset}, by distribution of the unlabeled images")
    panels[1].set_title("How far the estimate is from the truth")
    path = RESULTS / f"{dataset}.png"
    figure.savefig(path, dpi=110)
    return path


def commit(dataset: str, message: str) -> None:
    files = [str(p) for p in RESULTS.glob(f"{dataset}.*")]
    subprocess.run(["git", "add", *files], cwd=ROOT, check=True)
    subprocess.run(["git", "commit", "-qm", message, "--", *files], cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train and table a CPU experiment.")
    parser.add_argument("dataset", choices=("digits_lt", "fashion_mnist_lt"))
    parser.add_argument("--only", choices=DISTRIBUTIONS, help="one distribution")
    parser.add_argument("--method", choices=list(METHODS), help="one method")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--image-size", type=int, help="side of the images, in pixels")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--balanced", action="store_true", help="class-balanced labeled batches")
    parser.add_argument("--threads", type=int, help="CPU threads of torch and of the data pipeline")
    parser.add_argument("--commit", action="store_true", help="git commit after every run")
    options = parser.parse_args()
    os.chdir(ROOT)  # runs/ and launch/ lie here
    dataset = options.dataset
    kind, changes = "", []
    if options.image_size:
        kind, changes = f"_{options.image_size}px", [f"data.image_size={options.image_size}"]
    if options.steps:
        kind, changes = f"{kind}_{options.steps}", [*changes, f"train.steps={options.steps}"]
    if options.balanced:
        kind, changes = f"{kind}_balanced", [*changes, *BALANCED]
    results = f"{dataset}{kind}"
    cells = list(
        itertools.product(
            [options.only] if options.only else DISTRIBUTIONS,
            [options.method] if options.method else METHODS,
            options.seeds,
        )
    )
    for cell, member in members(dataset, cells, options.threads, kind, changes).items():
        shown = tuple(map(str, cell))
        if any(
            (r["distribution"], r["method"], str(r["seed"])) == shown for r in read_rows(results)
        ):
            print(f"{' '.join(shown)}: already in the results")
            continue
        if code := train_members([member], LAUNCHER):
            return code
        add_row(results, row(cell[0], member.run_dir))
        if options.commit:
            commit(results, f"Result: {results} {cell[0]}, {cell[1]}, seed {cell[2]}")
    print(table(read_rows(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
