"""What unlabeled images add on cached features of a frozen network: methods over split seeds.

    python bench/features_table.py model.weights=.photos/lite0.safetensors    # resumable

The first 12,000 images of Fashion-MNIST at 64 px through EfficientNet-Lite0 (ImageNet-1k;
`make demo-photos` fetches the weights): 50 labels of the most frequent class, gamma 25, 1,000
unlabeled images of the most frequent class under five distributions, ten split seeds; the
published test set. They are embedded once, in minutes; then a run takes seconds. Of every run the
mean over the classes of the test accuracy; rows go to bench/results/features_table.csv, the table
to .md: mean (standard error over split seeds), and paired differences to FixMatch with the same
start and to the labels alone.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import logging
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from common import RESULTS, machine

import simpro_fast
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.fashion_mnist import load_fashion_mnist
from simpro_fast.utils.atomic_write import write_atomically

CONFIG = Path(__file__).with_name("fashion_mnist_lite0.yaml")
DISTRIBUTIONS = ("consistent", "uniform", "reversed", "middle", "head_tail")
START = "data.class_balanced_steps=100"
RIVALS = ("FixMatch, balanced start", "Logistic regression on the labels")
IMAGES = 12_000
ROWS: dict[str, tuple[str, ...]] = {
    "FixMatch": ("method.name=fixmatch",),
    "FixMatch, balanced start": ("method.name=fixmatch", START),
    "SimPro": ("method.name=simpro",),
    "SimPro, balanced start": ("method.name=simpro", START),
}
ALONE = {
    "Logistic regression on the labels": "probe_class_mean",
    "Nearest labeled image": "neighbour_class_mean",
}
"""Rows of the labels alone, by the key of a run's summary."""
PATH = RESULTS / "features_table.csv"
Key = tuple[str, str, str]
"""Row, distribution, split seed."""


def fashion(data: DataConfig) -> simpro_fast.ArrayDataset:
    """The first images of Fashion-MNIST; `data.name=features_table.fashion`."""
    return _fashion(data.image_size)


@functools.cache
def _fashion(side: int | None) -> simpro_fast.ArrayDataset:
    whole = load_fashion_mnist(DataConfig(name="fashion_mnist", image_size=side))
    return replace(whole, images=whole.images[:IMAGES], labels=whole.labels[:IMAGES])


def read() -> dict[Key, float]:
    if not PATH.exists():
        return {}
    with PATH.open(newline="", encoding="utf-8") as file:
        found = csv.DictReader(file)
        return {(r["row"], r["distribution"], r["seed"]): float(r["class_mean"]) for r in found}


def add(values: dict[Key, float]) -> None:
    fresh = not PATH.exists()
    fields = ("row", "distribution", "seed", "class_mean", *machine())
    with PATH.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(fields)
        for (row, distribution, seed), value in values.items():
            writer.writerow((row, distribution, seed, f"{value:.3f}", *machine().values()))


def trained(row: str, distribution: str, seed: str, words: Sequence[str]) -> dict[Key, float]:
    """Accuracies of one run, and of the labels that it had."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        changes = (f"data.unlabeled_distribution={distribution}", f"data.split_seed={seed}")
        run = simpro_fast.train(
            CONFIG, *words, *changes, *ROWS[row], f"seed={seed}", f"output_dir={folder}"
        )
    found = {(row, distribution, seed): float(run.summary["top1_class_mean"])}
    return found | {(name, distribution, seed): run.summary[key] for name, key in ALONE.items()}


def mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.fmean(values):.1f} ({statistics.stdev(values) / len(values) ** 0.5:.1f})"


def table(found: dict[Key, float]) -> str:
    """Markdown: one line per row, one column per distribution and one for all of them."""
    seeds = sorted({seed for _, _, seed in found}, key=int)
    head = ["", *DISTRIBUTIONS, "all"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in (*ALONE, *ROWS):
        cells = [[found[k] for s in seeds if (k := (row, d, s)) in found] for d in DISTRIBUTIONS]
        cells.append(over_distributions(cells))
        lines.append(f"| {row} | {' | '.join(map(mean, cells))} |")
    for rival in RIVALS:
        lines.append(f"| **Paired difference to {rival}** |" + " |" * (len(head) - 1))
        for row in (*ALONE, *ROWS):
            if row != rival:
                cells = paired(found, row, rival, seeds)
                lines.append(f"| {row} | {' | '.join(map(mean, cells))} |")
    return "\n".join(lines) + "\n"


def paired(
    found: dict[Key, float], row: str, rival: str, seeds: Sequence[str]
) -> list[list[float]]:
    """Differences of each distribution, and of their means: a split seed counts once there."""
    cells = [
        [
            found[row, d, s] - found[rival, d, s]
            for s in seeds
            if (row, d, s) in found and (rival, d, s) in found
        ]
        for d in DISTRIBUTIONS
    ]
    return [*cells, over_distributions(cells)]


def over_distributions(cells: Sequence[list[float]]) -> list[float]:
    """Of each split seed the mean over the distributions; nothing while some runs are missing."""
    if len({len(cell) for cell in cells}) > 1:
        return []
    return [statistics.fmean(values) for values in zip(*cells, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="split seeds 1 ... N (10)")
    parser.add_argument("overrides", nargs="*", help="key.sub=value, for every run")
    options = parser.parse_args()
    logging.getLogger("simpro_fast").setLevel(logging.WARNING)
    for seed in map(str, range(1, options.seeds + 1)):
        for distribution in DISTRIBUTIONS:
            for row in ROWS:
                done = read()
                if (row, distribution, seed) not in done:
                    new = trained(row, distribution, seed, options.overrides)
                    add({key: value for key, value in new.items() if key not in done})
            print(f"split seed {seed}, {distribution}", file=sys.stderr, flush=True)
    write_atomically(PATH.with_suffix(".md"), table(read()))
    shutil.copyfileobj(PATH.with_suffix(".md").open(encoding="utf-8"), sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
