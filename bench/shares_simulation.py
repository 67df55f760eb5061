"""Do the 95 % intervals of class shares cover? Made-up networks and images, in minutes.

    python bench/shares_simulation.py [--sets 30] [--classes 2,5,10,100,200]

For every number of classes and kind of true shares: networks of 50 to 95 % accuracy with random
confusions, 20 validation images of each class, 2,000 unlabeled images. Of every set the share of
classes whose true share lies in its interval (a set counts once: its classes are not independent),
of absent classes alone, the mean width, and KL(true || estimate) beside that of the predicted
shares as they are. Rows go to bench/results/shares_simulation.csv.

    python bench/shares_simulation.py --scores

compares the point estimates instead, on networks whose log-likelihoods are twice the right ones
(`right up to a temperature`), or which do not know the spread of any class (`wrong`), with the same
numbers of images; rows go to bench/results/shares_scores.csv.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import RESULTS, names_of, write_table
from scipy.special import softmax

from simpro_fast.answers.estimation.bayesian import bayesian_shares
from simpro_fast.answers.estimation.point_shares import calibrated_posteriors, em_shares

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


def one_set_of_scores(
    rng: np.random.Generator, classes: int, kind: str, wrong: bool
) -> dict[str, float | None]:
    """KL of the point estimates for Gaussian classes in ten dimensions."""
    centres = rng.uniform(0.5, 0.9) * rng.normal(size=(classes, 10))
    spread = rng.uniform(0.5, 1.5, classes) if wrong else np.ones(classes)

    def scores(labels: np.ndarray) -> np.ndarray:
        points = centres[labels] + spread[labels, None] * rng.normal(size=(len(labels), 10))
        return -(np.square(points[:, None] - centres).sum(2))  # half of it is the log-likelihood

    images = rng.multinomial(IMAGES, KINDS[kind](rng, classes))
    known = np.repeat(np.arange(classes), VALIDATION)
    f_known, f = scores(known), scores(np.repeat(np.arange(classes), images))
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (known, f_known.argmax(1)), 1)
    predicted = np.bincount(f.argmax(1), minlength=classes)
    even, plain = np.ones(classes), softmax(f, axis=1)
    calibrated = calibrated_posteriors(f_known, known, f)
    found = {
        "bayesian": bayesian_shares(confusion, predicted, seed=int(rng.integers(1 << 31))).estimate,
        "em_calibrated": em_shares(calibrated, even, pseudo_images=1).shares,
        "em": em_shares(plain, even).shares,
        "mean_posterior": plain.mean(0),
        "predicted": predicted / IMAGES,
    }
    true = images / IMAGES
    apart = [divergence(true, found[name]) for name in ("bayesian", "em_calibrated")]
    return {
        "accuracy": 100 * float(np.diag(confusion).sum()) / len(known),
        **{f"kl_{name}": divergence(true, shares) for name, shares in found.items()},
        "bayesian_less_em_calibrated": apart[0] - apart[1],
    }


def summary(
    classes: int, kind: str, sets: int, one: Callable[..., dict[str, float | None]], *network: bool
) -> dict[str, Any]:
    rng = np.random.default_rng([classes, list(KINDS).index(kind)])
    found = [one(rng, classes, kind, *network) for _ in range(sets)]
    row: dict[str, Any] = {"classes": classes, "shares": kind, "sets": sets}
    for key in found[0]:
        values = [value for each in found if (value := each[key]) is not None]
        row[key] = round(statistics.fmean(values), 4) if values else ""
        if key in ("covered", "bayesian_less_em_calibrated"):
            row[f"{key}_se"] = round(statistics.stdev(values) / len(values) ** 0.5, 4)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", type=int, default=30)
    parser.add_argument(
        "--classes", type=names_of(map(str, range(2, 1001))), default=["2", "5", "10", "100", "200"]
    )
    parser.add_argument("--scores", action="store_true", help="point estimates, see above")
    options = parser.parse_args()
    rows = []
    for classes, kind in itertools.product(map(int, options.classes), KINDS):
        if options.scores:
            for network, wrong in (("right up to a temperature", False), ("wrong", True)):
                found = summary(classes, kind, options.sets, one_set_of_scores, wrong)
                rows.append({"network": network, **found})
        else:
            rows.append(summary(classes, kind, options.sets, one_set))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    name = "shares_scores" if options.scores else "shares_simulation"
    keys = ("classes", "shares", "commit", *(("network",) if options.scores else ()))
    write_table(RESULTS / f"{name}.csv", rows, replace=keys)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
