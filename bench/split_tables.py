"""Methods beside each other over split seeds: the tables of README and docs/results.md.

    python bench/split_tables.py digits                               # resumable
    python bench/split_tables.py features --set model.weights=.photos/lite0.safetensors
    PYTHONPATH=. python bench/split_tables.py stamps                  # after `make demo-photos`
    python bench/split_tables.py digits --choose                      # which recipe each row has
    python bench/split_tables.py digits --seeds 2 4 --only SimPro ACR # some of the runs
    python bench/split_tables.py digits --seeds                       # only write the table

Every split seed draws labeled, unlabeled and held-out images anew; the unlabeled ones follow five
distributions. Of every run the mean over the classes of the test accuracy (%), KL(true || pi_u) and
how good the estimated class shares are go to bench/results/splits_<table>.csv; the table, .md, has
means, (standard errors over the split seeds), and paired differences to FixMatch with a
class-balanced start.

features: the first 12,000 images of Fashion-MNIST at 64 px through EfficientNet-Lite0 (ImageNet-1k;
`make demo-photos` fetches the weights), 50 labels of the most frequent class, gamma 25, 1,000
unlabeled images of the most frequent class; they are embedded once, in minutes, then a run takes
seconds (CCL's, which projects all 1,280 features, a quarter of an hour: it is left out). stamps:
the pictures of `make demo-photos`, through the same network and split as there. digits:
bench/splits_digits.yaml. fashion_mnist: at 14 px, bench/splits_fashion_mnist.yaml.

Each row has one recipe, that of configs/_base/short_run.yaml with what `chosen` says; it was the
best of the table's `candidates` on split seeds from 101 on, which the table does not show
(splits_<table>_choice.csv). FixMatch, which all are compared with, is shown at both thresholds.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import io
import itertools
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

import simpro_fast
from simpro_fast.answers.evaluation import kl_divergence
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.fashion_mnist import load_fashion_mnist
from simpro_fast.utils.atomic_write import write_atomically

HERE = Path(__file__).parent
DISTRIBUTIONS = ("consistent", "uniform", "reversed", "middle", "head_tail")
NATURAL = ("as they are",)
START = "balanced start"
"""Stands for `Table.start` class-balanced steps."""
RIVAL = "FixMatch, balanced start"
FASHION_IMAGES = 12_000
Words = tuple[str, ...]
HIGH = ("method.threshold=0.95",)
METHODS: dict[str, Words] = {
    "FixMatch": ("method.name=fixmatch",),
    RIVAL: ("method.name=fixmatch", START),
    "SimPro": ("method.name=simpro",),
    "SimPro, balanced start": ("method.name=simpro", START),
    "SimPro, published tau": ("method.name=simpro", "method.tau=2"),
    "SimPro*": ("method.name=simpro_star",),
    "ACR": ("method.name=acr",),
    "CoSSL": ("method.name=cossl",),
    "ABC": ("method.name=abc",),
    "CPG": ("method.name=cpg",),
    "ADELLO": ("method.name=adello",),
    "DARP, estimated shares": ("method.name=darp",),
    "CDMAD": ("method.name=cdmad",),
    "DASO": ("method.name=daso",),
    "CReST+": ("method.name=crest_plus",),
    "CCL": ("method.name=ccl",),
}
BOTH_THRESHOLDS = {f"{row}, threshold 0.95": (*METHODS[row], *HIGH) for row in ("FixMatch", RIVAL)}
FEW = ("FixMatch", RIVAL, "SimPro", "SimPro, balanced start", "CoSSL", "CPG")
LABELS_ALONE = {
    "Logistic regression on the labels": "probe_class_mean",
    "Nearest labeled image": "neighbour_class_mean",
}
"""Rows of the labels alone, by the key of a run's summary."""
CANDIDATES: tuple[Words, ...] = ((), HIGH, ("optim.lr=0.03",))
NUMBERS = {
    "class_mean": ("Accuracy, mean of the classes, %", 1),
    "kl_pi_u": ("KL(true, pi_u), nats", 2),
    "kl_shares": ("KL(true, estimated shares), nats", 3),
    "covered": ("True shares inside their 95 % intervals, %", 0),
}
"""Columns of the rows, with title and decimal places in the table."""
Key = tuple[str, str, str]
"""Row, distribution, split seed."""
Found = dict[Key, dict[str, float]]


@dataclass(frozen=True)
class Table:
    """One table: its configuration, its rows, and how many split seeds it has."""

    name: str
    rows: dict[str, Words]
    seeds: int
    chosen: dict[str, Words]
    """Row to its recipe, one of `candidates`; a row without has that of the configuration."""
    candidates: tuple[Words, ...] = CANDIDATES
    choice_seeds: tuple[str, ...] = ("101",)
    chosen_on: tuple[str, ...] = ("uniform", "reversed")
    distributions: tuple[str, ...] = DISTRIBUTIONS
    start: int = 100
    """Steps of a balanced start."""
    alone: bool = False
    """Whether it has rows of the labels alone."""

    @property
    def config(self) -> Path:
        return HERE / f"splits_{self.name}.yaml"

    def split(self, distribution: str, seed: str) -> Words:
        """Changes of the configuration that say which images are labeled and unlabeled."""
        if self.name == "stamps":
            return (f"data.split_file={_stamp_split(int(seed))}",)
        return f"data.unlabeled_distribution={distribution}", f"data.split_seed={seed}"


def with_start(words: Words, table: Table) -> Words:
    """Changes of the configuration, with what START stands for."""
    start = f"data.class_balanced_steps={table.start}"
    return tuple(start if word == START else word for word in words)


TABLES = {
    table.name: table
    for table in (
        Table(
            "digits",
            METHODS,
            5,
            dict.fromkeys(
                ("ACR", "CoSSL", "ABC", "DARP, estimated shares", "CDMAD", "DASO", "CCL"), HIGH
            ),
            CANDIDATES[:2],
            start=50,
        ),
        Table(
            "fashion_mnist",
            {row: METHODS[row] for row in FEW},
            5,
            dict.fromkeys(("FixMatch", RIVAL, "SimPro", "CoSSL"), HIGH),
            CANDIDATES[:2],
        ),
        Table(
            "features",
            {row: words for row, words in METHODS.items() if row != "CCL"} | BOTH_THRESHOLDS,
            10,
            dict.fromkeys(("ACR", "ADELLO", "DARP, estimated shares"), HIGH),
            alone=True,
        ),
        Table(
            "stamps",
            METHODS,
            10,
            {},
            distributions=("as they are",),
            chosen_on=("as they are",),
            alone=True,
        ),
    )
}


def fashion(data: DataConfig) -> simpro_fast.ArrayDataset:
    """The first images of Fashion-MNIST; `data.name=split_tables.fashion`."""
    return _fashion(data.image_size)


@functools.cache
def _fashion(side: int | None) -> simpro_fast.ArrayDataset:
    whole = load_fashion_mnist(DataConfig(name="fashion_mnist", image_size=side))
    return replace(
        whole, images=whole.images[:FASHION_IMAGES], labels=whole.labels[:FASHION_IMAGES]
    )


def _stamp_split(seed: int) -> Path:
    path: Path = _demo_photos().split(_stamp_labels(), seed)
    return path


def _demo_photos() -> Any:
    return importlib.import_module("launch.demo_photos")  # on the path with PYTHONPATH=. only


@functools.cache
def _stamp_labels() -> np.ndarray:
    labels: np.ndarray = _demo_photos().stamps(DataConfig(name="stamps")).labels
    return labels


def read(path: Path) -> Found:
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            (r["row"], r["distribution"], r["seed"]): {n: float(r[n]) for n in NUMBERS if r[n]}
            for r in csv.DictReader(file)
        }


def add(path: Path, new: Found) -> None:
    """Append rows, each by one call, so that two processes can share a file."""
    here = machine()
    if not path.exists():
        path.write_text(f"row,distribution,seed,{','.join((*NUMBERS, *here))}\n", encoding="utf-8")
    for key, numbers in new.items():
        line = io.StringIO()
        values = [f"{numbers[n]:.4f}" if n in numbers else "" for n in NUMBERS]
        csv.writer(line, lineterminator="\n").writerow((*key, *values, *here.values()))
        with path.open("a", encoding="utf-8") as file:
            file.write(line.getvalue())


def trained(table: Table, words: Sequence[str], distribution: str, seed: str) -> dict[str, Any]:
    """The summary of a run."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        changes = (*table.split(distribution, seed), f"seed={seed}", f"output_dir={folder}")
        run = simpro_fast.train(table.config, *words, *changes)
    return run.summary


def numbers(summary: dict[str, Any]) -> dict[str, float]:
    """`NUMBERS` of a run, those of the shares where it has estimated them."""
    found = {"class_mean": summary["top1_class_mean"], "kl_pi_u": summary["kl_pi_u"]}
    if summary.get("shares"):
        true, rows = summary["pi_u_true"], summary["shares"]["rows"]
        found["kl_shares"] = kl_divergence(true, [row["estimate"] for row in rows])
        inside = [
            row["low"] - 1e-9 <= t <= row["high"] + 1e-9 for t, row in zip(true, rows, strict=True)
        ]
        found["covered"] = 100 * statistics.fmean(inside)
    return found


def mean(values: Sequence[float], digits: int = 1) -> str:
    """With the standard error of several."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.{digits}f} ({error:.{digits}f})"


def markdown(table: Table, found: Found) -> str:
    """One line per row, one column per distribution and one for all of them."""
    seeds = sorted({seed for _, _, seed in found}, key=int)
    rows = [*(LABELS_ALONE if table.alone else ()), *table.rows]
    rows = [row for row in rows if any(key[0] == row for key in found)]
    several = len(table.distributions) > 1
    lines: list[str] = []

    def part(title: str, names: Sequence[str], number: str, rival: str | None, digits: int) -> None:
        columns = (*table.distributions, *(("all",) if several else ()), "split seeds")
        lines.extend((f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"))
        for row in names:
            cells = of(found, row, rival, seeds, number, table.distributions)
            together = over_distributions(cells)
            shown = [mean(list(cell.values()), digits) for cell in cells]
            shown += [*([mean(together, digits)] if several else ()), str(len(together))]
            lines.append(f"| {row} | {' | '.join(shown)} |")
        lines.append("")

    part(NUMBERS["class_mean"][0], rows, "class_mean", None, 1)
    for rival in (RIVAL, *(list(LABELS_ALONE)[:1] if table.alone else ())):
        others = [row for row in rows if row != rival]
        part(f"Paired difference to {rival}", others, "class_mean", rival, 1)
    for number, (title, digits) in list(NUMBERS.items())[1:]:
        having = [r for r in rows if any(k[0] == r and number in v for k, v in found.items())]
        if having:
            part(title, having, number, None, digits)
    return "\n".join(lines)


def of(
    found: Found,
    row: str,
    rival: str | None,
    seeds: Sequence[str],
    number: str,
    distributions: Sequence[str] = DISTRIBUTIONS,
) -> list[dict[str, float]]:
    """By distribution: split seed to the number of a row, less that of the rival."""

    def values(name: str, distribution: str) -> dict[str, float]:
        numbers = {seed: found.get((name, distribution, seed), {}) for seed in seeds}
        return {seed: of_run[number] for seed, of_run in numbers.items() if number in of_run}

    cells = []
    for distribution in distributions:
        own = values(row, distribution)
        if rival is not None:
            theirs = values(rival, distribution)
            own = {seed: value - theirs[seed] for seed, value in own.items() if seed in theirs}
        cells.append(own)
    return cells


def over_distributions(cells: Sequence[dict[str, float]]) -> list[float]:
    """The mean over the distributions of each split seed that has all of them; it counts once."""
    complete = set.intersection(*(set(cell) for cell in cells))
    return [statistics.fmean(cell[seed] for cell in cells) for seed in sorted(complete)]


def runs(table: Table, options: argparse.Namespace) -> Iterator[tuple[Key, Words]]:
    """What is to be trained, split seed by split seed; the name of a candidate is its words."""
    rows = options.only or list(table.rows)
    if options.choose:
        for seed, change, distribution, row in itertools.product(
            table.choice_seeds, table.candidates, table.chosen_on, rows
        ):
            yield (
                (f"{row} {' '.join(change)}".strip(), distribution, seed),
                table.rows[row] + change,
            )
        return
    for seed, distribution, row in itertools.product(options.seeds, table.distributions, rows):
        yield (row, distribution, str(seed)), table.rows[row] + table.chosen.get(row, ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="*", help="split seeds")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="some rows")
    parser.add_argument("--choose", action="store_true", help="train every candidate recipe")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for every run")
    options = parser.parse_args()
    table = TABLES[options.table]
    if options.seeds is None:
        options.seeds = range(1, table.seeds + 1)
    logging.getLogger("simpro_fast").setLevel(logging.WARNING)
    path = RESULTS / f"splits_{table.name}{'_choice' if options.choose else ''}.csv"
    for key, words in runs(table, options):
        done = read(path)
        if key not in done:
            _, distribution, seed = key
            changes = (*with_start(words, table), *options.set)
            summary = trained(table, changes, distribution, seed)
            new = {key: numbers(summary)}
            for name, number in LABELS_ALONE.items() if table.alone else ():
                new[name, distribution, seed] = {"class_mean": summary[number]}
            add(path, {key: values for key, values in new.items() if key not in done})
            print(*key, new[key], file=sys.stderr, flush=True)
    if not options.choose:
        write_atomically(path.with_suffix(".md"), markdown(table, read(path)))
        print(path.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
