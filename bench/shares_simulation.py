"""Do the 95 % intervals of class shares cover? Made-up networks and images, in minutes.

    python bench/shares_simulation.py [--sets 30] [--classes 2,5,10,100,200]

For every number of classes and kind of true shares: networks of 50 to 95 % accuracy with random
confusions, 20 validation images of each class, 2,000 unlabeled images. Of every set the share of
classes whose true share lies in its interval (a set counts once: its classes are not independent),
of absent classes alone, the mean width, and KL(true || estimate) beside that of the predicted
shares as they are. Rows go to bench/results/shares_simulation.csv.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import RESULTS, names_of, write_table

from simpro_fast.answers.estimation.bayesian import bayesian_shares

VALIDATION, IMAGES = 20, 2000
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "uniform": lambda rng, k: np.full(k, 1 / k),
    "Dirichlet(1)": lambda rng, k: rng.dirichlet(np.ones(k)),
    "tail 100:1": lambda rng, k: rng.permutation(tail(100, k)),
    "a third absent": lambda rng, k: rng.permutation(absent(rng, k)),
    "tail 10,000:1": lambda rng, k: rng.permutation(tail(10_000, k)),
}


def tail(gamma: float, classes: int) -> np.ndarray:
    shares = gamma ** -np.linspace(0, 1, classes)
    return shares / shares.sum()


def absent(rng: np.random.Generator, classes: int) -> np.ndarray:
    present = classes - max(1, classes // 3)
    return np.append(rng.dirichlet(np.ones(present)), np.zeros(classes - present))


def divergence(true: np.ndarray, found: np.ndarray) -> float:
    found = np.maximum(found, 1e-4) / np.maximum(found, 1e-4).sum()
    seen = true > 0
    return float((true[seen] * np.log(true[seen] / found[seen])).sum())


def one_set(rng: np.random.Generator, classes: int, kind: str) -> dict[str, float | None]:
    accuracy = rng.uniform(0.5, 0.95, classes)
    wrong = rng.dirichlet(np.full(classes, 0.5), classes)
    rates = np.diag(accuracy) + (1 - accuracy)[:, None] * wrong
    rates /= rates.sum(1, keepdims=True)
    images = rng.multinomial(IMAGES, KINDS[kind](rng, classes))
    true = images / IMAGES
    confusion = rng.multinomial(VALIDATION, rates)
    predicted = rng.multinomial(images, rates).sum(0)
    begun = time.process_time()
    found = bayesian_shares(confusion, predicted, seed=int(rng.integers(1 << 31)))
    covered = (found.low <= true) & (true <= found.high)
    none = images == 0
    return {
        "covered": 100 * covered.mean(),
        "covered_absent": 100 * covered[none].mean() if none.any() else None,
        "width": 100 * float((found.high - found.low).mean()),
        "kl": divergence(true, found.estimate),
        "kl_predicted": divergence(true, predicted / IMAGES),
        "agreed": 100.0 * found.converged,
        "seconds": time.process_time() - begun,
    }


def summary(classes: int, kind: str, sets: int) -> dict[str, Any]:
    rng = np.random.default_rng([classes, list(KINDS).index(kind)])
    found = [one_set(rng, classes, kind) for _ in range(sets)]
    row: dict[str, Any] = {"classes": classes, "shares": kind, "sets": sets}
    for key in found[0]:
        values = [value for one in found if (value := one[key]) is not None]
        row[key] = round(statistics.fmean(values), 4) if values else ""
        if key == "covered":
            row["covered_se"] = round(statistics.stdev(values) / len(values) ** 0.5, 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", type=int, default=30)
    parser.add_argument(
        "--classes", type=names_of(map(str, range(2, 1001))), default=["2", "5", "10", "100", "200"]
    )
    options = parser.parse_args()
    rows = []
    for classes in map(int, options.classes):
        for kind in KINDS:
            rows.append(summary(classes, kind, options.sets))
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    write_table(RESULTS / "shares_simulation.csv", rows, replace=("classes", "shares", "commit"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
