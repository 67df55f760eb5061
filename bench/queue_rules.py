"""Which images to label next: accuracy after labeling them, by the rule that chose them.

    OMP_NUM_THREADS=1 python bench/queue_rules.py [--seeds 1 2 3 4 5] [--counts 50 100 20]

For every split seed a run on digits (bench/splits_digits.yaml) is trained, each rule orders its
unlabeled images, the first ones get their true labels, and the network is trained anew on the new
lists. Rules: the smallest margins of all; or the smallest margins of every predicted class, places
dealt by the method of Sainte-Lague with the class weights named (l the labeled share, e the
estimated share of the unlabeled images). Rows go to bench/results/queue_rules.csv, where what is
there is not trained again; the table, .md, has means and paired differences to plain margin, with
(standard errors over split seeds).
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import logging
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, write_table
from split_tables import mean

import simpro_fast
from simpro_fast.answers.predict import classify, margin_and_entropy
from simpro_fast.answers.unlabeled import unlabeled_set
from simpro_fast.data.splits.split import load_split
from simpro_fast.training.in_process import FinishedRun
from simpro_fast.utils.atomic_write import write_atomically

CONFIG = Path(__file__).parent / "splits_digits.yaml"
ROWS = RESULTS / "queue_rules.csv"
MOST = 100
MARGIN, BEFORE = "margin", "no new labels"
Weights = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
WEIGHTS: dict[str, Weights] = {
    "1 / (l + pi_u)": lambda labeled, pi_u, shares: 1 / (labeled + pi_u),
    "sqrt(e / l)": lambda labeled, pi_u, shares: np.sqrt(shares / labeled),
    "equal weights": lambda labeled, pi_u, shares: np.ones(len(labeled)),
}
"""Of the shares [K] labeled, by pi_u, and by the estimate at the end of the run."""


def dealt(classes: np.ndarray, margin: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Places int64 [MOST], the smallest margins of every class first."""
    quotients = np.zeros(len(classes))
    for k, weight in enumerate(weights):
        own = np.flatnonzero(classes == k)
        own = own[np.argsort(margin[own], kind="stable")]
        quotients[own] = weight / (2 * np.arange(len(own)) + 1)
    return np.argsort(-quotients, kind="stable")[:MOST]


def trained(run: Path, seed: int, *words: str) -> FinishedRun:
    with redirect_stdout(io.StringIO()):
        return simpro_fast.train(CONFIG, *words, f"seed={seed}", f"output_dir={run}")


class Round:
    """One run, and its unlabeled images as each rule orders them."""

    def __init__(self, folder: Path, distribution: str, seed: int) -> None:
        self._folder, self._seed = folder, seed
        split = f"data.unlabeled_distribution={distribution}", f"data.split_seed={seed}"
        run = trained(folder / "before", seed, *split)
        self.before: float = run.summary["top1_class_mean"]
        self._split, unlabeled = load_split(run.path), unlabeled_set(run.path)
        self._rows = unlabeled.dataset_rows
        chunks = classify(
            run.model, self._rows.tolist(), unlabeled.pixels, batch_size=256, threads=1
        )
        p = run.model.probabilities(np.concatenate([chunk.logits for chunk in chunks]))
        margin, _ = margin_and_entropy(p)
        self._wrong = p.argmax(1) != unlabeled.dataset.labels[self._rows]
        shares = np.array([row["estimate"] for row in run.summary["shares"]["rows"]])
        counts = np.array(self._split.labeled_counts)
        known = counts / counts.sum(), np.array(run.model.file.pi_u), shares
        self._queues = {MARGIN: np.argsort(margin, kind="stable")[:MOST]} | {
            rule: dealt(p.argmax(1), margin, weights(*known)) for rule, weights in WEIGHTS.items()
        }

    def after(self, rule: str, count: int) -> dict[str, float]:
        """Accuracy with the first `count` images of a queue labeled, and errors among them."""
        places = self._queues[rule][:count]
        labeled = np.append(self._split.labeled, self._rows[places])
        rest = self._split.unlabeled[~np.isin(self._split.unlabeled, self._rows[places])]
        with tempfile.TemporaryDirectory() as folder:
            lists = Path(folder) / "split.npz"
            np.savez(lists, labeled=labeled, unlabeled=rest, test=self._split.test)
            words = f"data.split_file={lists}", "data.allow_empty_classes=true"
            run = trained(Path(folder), self._seed, *words)
        return {
            "class_mean": run.summary["top1_class_mean"],
            "wrong": 100 * float(self._wrong[places].mean()),
        }


def rows() -> list[dict[str, str]]:
    if not ROWS.exists():
        return []
    with ROWS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(found: list[dict[str, str]]) -> str:
    """One line per rule and distribution, columns for every number of labels that all rules have
    in two split seeds or more."""
    lines = []
    for distribution in dict.fromkeys(row["distribution"] for row in found):
        of: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
        for row in found:
            if row["distribution"] == distribution:
                of.setdefault((row["rule"], row["labels"]), {})[row["seed"]] = row
        counts = [
            count
            for count in sorted({count for _, count in of}, key=int)
            if all(len(of.get((rule, count), ())) > 1 for rule in (MARGIN, *WEIGHTS))
        ]
        titles = ["accuracy", "difference to margin", "predicted wrongly among them"]
        head = [f"{title}, {count} labels" for title in titles for count in counts]
        lines += [f"| {distribution} | {' | '.join(head)} | split seeds |"]
        lines += ["|---" * (len(head) + 2) + "|"]
        for rule in (MARGIN, *WEIGHTS):
            own, rival = ([of[name, count] for count in counts] for name in (rule, MARGIN))
            accuracy = [{k: float(r["class_mean"]) for k, r in cell.items()} for cell in own]
            apart = [
                [cell[k] - float(r["class_mean"]) for k, r in theirs.items() if k in cell]
                for cell, theirs in zip(accuracy, rival, strict=True)
            ]
            shown = [mean(list(cell.values())) for cell in accuracy]
            shown += ["" if rule == MARGIN else mean(cell) for cell in apart]
            shown += [mean([float(r["wrong"]) for r in cell.values()], 0) for cell in own]
            lines.append(f"| {rule} | {' | '.join(shown)} | {min(map(len, own))} |")
        before = [float(row["class_mean"]) for row in of[BEFORE, "0"].values()]
        lines += ["", f"Before, accuracy (mean of the classes) is {mean(before)} %.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5], help="of splits")
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 100, 20])
    parser.add_argument("--distribution", default="reversed", help="of the unlabeled images")
    options = parser.parse_args()
    logging.getLogger("simpro_fast").setLevel(logging.WARNING)
    key = ("distribution", "seed", "rule", "labels")
    for seed in options.seeds:
        done = {tuple(row[name] for name in key) for row in rows()}
        names = itertools.product(options.counts, (MARGIN, *WEIGHTS))
        missing = [
            (rule, count)
            for count, rule in names
            if (options.distribution, str(seed), rule, str(count)) not in done
        ]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            this = Round(Path(folder), options.distribution, seed)
            todo = [(BEFORE, 0, {"class_mean": this.before}), *((*m, None) for m in missing)]
            for rule, count, known in todo:
                numbers = known or this.after(rule, count)
                values = options.distribution, seed, rule, count
                row: dict[str, Any] = dict(zip(key, values, strict=True))
                row |= {name: round(number, 4) for name, number in numbers.items()}
                write_table(ROWS, [{**row, "wrong": row.get("wrong", "")}], replace=key)
                print(*row.values(), flush=True)
    write_atomically(ROWS.with_suffix(".md"), markdown(rows()))
    print(ROWS.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
