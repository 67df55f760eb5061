"""Class shares of unlabeled images by several estimators, from a stream of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from simpro_fast.answers.estimation.bayesian import bayesian_shares
from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.estimation.point_shares import (
    black_box_shares,
    calibrated_posteriors,
    em_shares,
)
from simpro_fast.answers.evaluation import TEMPERATURE_NUMBERS
from simpro_fast.answers.labeled import LabeledLogits
from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.predict import Unreadable, classify, item_pixels
from simpro_fast.answers.sources import Item
from simpro_fast.utils.errors import UserError

EM_NUMBERS = 1 << 24
"""Most logits that EM looks at: 1.6 million images of 10 classes, 16,777 of 1,000."""
FAR = 0.01
"""How far outside an interval another estimate must be to be warned of."""


class Reservoir:
    """At most `size` of a stream, each as likely to be among them (Vitter's algorithm R)."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._rng, self.seen = size, np.random.default_rng(seed), 0

    def places(self, count: int) -> np.ndarray:
        """int64 [count]: where each of the next ones goes, -1 for nowhere."""
        numbers = np.arange(self.seen, self.seen + count)
        self.seen += count
        drawn = self._rng.integers(0, numbers + 1)
        drawn = np.where(numbers < self._size, numbers, drawn)
        return np.where(drawn < self._size, drawn, -1)


def sample(items: Iterable[Item], size: int, seed: int) -> tuple[list[Item], int]:
    """`size` items drawn evenly from a stream of any length, in its order, and how many others."""
    reservoir, kept = Reservoir(size, seed), dict[int, tuple[int, Item]]()
    for number, item in enumerate(items):
        if (place := int(reservoir.places(1)[0])) >= 0:
            kept[place] = (number, item)
    chosen = [item for _, item in sorted(kept.values(), key=lambda pair: pair[0])]
    return chosen, reservoir.seen - len(chosen)


@dataclass
class Predicted:
    """Predictions of a set of unlabeled images."""

    predicted: np.ndarray
    """int64 [K] images by argmax f(x)."""
    probability: np.ndarray
    """float64 [K], the sum of softmax(f)."""
    logits: np.ndarray
    """float32 [n, K] of images drawn evenly, for EM."""
    unreadable: Unreadable = field(default_factory=Unreadable)

    @property
    def images(self) -> int:
        return int(self.predicted.sum())


def look_at(
    model: TrainedModel,
    items: Iterable[Item],
    *,
    seed: int,
    batch_size: int,
    threads: int,
    progress: Callable[[int], None],
) -> Predicted:
    """Classify a stream; in memory are sums and the logits for EM (64 MiB at most).

    Raises:
        UserError: no image, or none that can be read.
    """
    classes = len(model.class_names)
    size = max(1, EM_NUMBERS // classes)
    found = Predicted(np.zeros(classes, np.int64), np.zeros(classes), np.empty((0, 0)))
    reservoir, done, kept = Reservoir(size, seed), 0, np.empty((0, classes), np.float32)
    pixels_of = partial(item_pixels, square=model.file.square)
    for chunk in classify(model, items, pixels_of, batch_size=batch_size, threads=threads):
        logits = chunk.logits[chunk.readable]
        found.predicted += np.bincount(logits.argmax(axis=1), minlength=classes)
        found.probability += model.probabilities(logits).sum(axis=0)
        if len(kept) < (needed := min(size, reservoir.seen + len(logits))):
            grown = np.empty((min(size, 2 * needed), classes), np.float32)
            grown[: len(kept)] = kept
            kept = grown
        for row, place in zip(logits, reservoir.places(len(logits)), strict=True):
            if place >= 0:
                kept[place] = row
        found.unreadable.add((item.path, status) for item, status in chunk.bad)
        done += len(chunk.items)
        progress(done)
    found.logits = kept[: min(size, reservoir.seen)]
    if not found.images:
        first = found.unreadable.first
        said = f"no image could be read (first: {first})" if first else "the folders hold no image"
        raise UserError(f"{said}; check the paths")
    return found


def estimate_shares(
    class_names: Sequence[str],
    confusion: np.ndarray,
    predicted: np.ndarray,
    seed: int,
    unseen: int = 0,
) -> dict[str, Any]:
    """Class shares with 95 % intervals as files have them; arguments as of `bayesian_shares`.

    Returns:
        `method`, `images` (classified), `unseen`, `converged`, `consistent` and `rows` ({class,
        estimate, low, high}: shares of 1).
    """
    found = bayesian_shares(confusion, predicted, seed=seed, unseen=unseen)
    columns = zip(class_names, found.estimate, found.low, found.high, strict=True)
    return {
        "method": "bayesian",
        "images": int(predicted.sum()),
        "unseen": unseen,
        "converged": found.converged,
        "consistent": found.consistent,
        "rows": [
            {"class": name, "estimate": float(share), "low": float(low), "high": float(high)}
            for name, share, low, high in columns
        ],
    }


def images_of(document: Mapping[str, Any]) -> str:
    """Of how many images the shares are, for tables and figures."""
    images, unseen = document["images"], document["unseen"]
    return f"{images + unseen:,} images" + (f", {images:,} of them classified" if unseen else "")


def estimates(
    model: TrainedModel,
    images: Predicted,
    confusion: np.ndarray | None,
    seed: int,
    known: LabeledLogits | None = None,
    unseen: int = 0,
) -> dict[str, Any]:
    """The content of shares.json that is estimated.

    Args:
        confusion: validation counts [K, K]; None: a point estimate without an interval.
        known: the validation images, where their logits are at hand, for `em_calibrated`.
        unseen: further images, from which these were drawn evenly.

    Returns:
        `images`, `unseen`, `method`, `level`, `converged`, `em_images`, `rows` ({class, estimate,
        low, high, method, predicted, black_box, em_calibrated, em, mean_posterior, pi_u}: shares
        of 1, null where there is none), `warnings`.
    """
    file, names = model.file, model.class_names
    em = em_shares(model.probabilities(images.logits, file.phi), np.array(file.phi))
    pi_u = np.array(file.pi_u) / sum(file.pi_u)
    mean_posterior = images.probability / images.images
    beside: dict[str, np.ndarray | list[None]] = {
        "predicted": images.predicted / images.images,
        "black_box": [None] * len(names),
        "em_calibrated": [None] * len(names),
        "em": em.shares,
        "mean_posterior": mean_posterior,
        "pi_u": pi_u,
    }
    warnings = [] if em.converged else ["EM did not converge; its shares are where it stopped"]
    if confusion is None:
        found: dict[str, Any] = {
            "method": "mean_posterior",
            "images": images.images,
            "unseen": unseen,
            "converged": True,
            "consistent": True,
            "rows": [
                {"class": name, "estimate": float(share), "low": None, "high": None}
                for name, share in zip(names, mean_posterior, strict=True)
            ],
        }
        warnings.append(
            "without validation images there is no interval, and nothing says how far the estimate "
            "is off; give --calibrate VAL, some images of every class with known classes, or train "
            "on cached features (train.features=auto) and give --out-of-fold 5"
        )
    else:
        found = estimate_shares(names, confusion, images.predicted, seed, unseen)
        beside["black_box"] = black_box_shares(confusion, images.predicted)
        warnings += _doubts(names, confusion, found)
        others = {"EM": em.shares, "pi_u of the training": pi_u}
        if known is not None:
            others["EM"] = beside["em_calibrated"] = _calibrated(model, known, images)
        for name, other in others.items():
            warnings += _disagreement(name, other, found["rows"])
    for k, row in enumerate(found["rows"]):
        row["method"] = found["method"]
        for key, values in beside.items():
            row[key] = None if (value := values[k]) is None else float(value)
    return {
        **found,
        "level": None if confusion is None else 0.95,
        "em_images": len(images.logits),
        "warnings": warnings,
    }


def _calibrated(model: TrainedModel, known: LabeledLogits, images: Predicted) -> np.ndarray:
    """Shares [K] by EM from calibrated posteriors, with one more image of every class."""
    every = -(-known.logits.size // TEMPERATURE_NUMBERS)
    scores, asked = (
        np.log(np.maximum(model.probabilities(logits, "uniform"), 1e-300))
        for logits in (known.logits[::every], images.logits)
    )
    posteriors = calibrated_posteriors(scores, known.targets[::every], asked)
    return em_shares(posteriors, np.ones(len(model.class_names)), pseudo_images=1).shares


def _doubts(names: Sequence[str], confusion: np.ndarray, estimate: dict[str, Any]) -> list[str]:
    found = []
    missing = [names[k] for k in np.flatnonzero(confusion.sum(axis=1) == 0).tolist()]
    if missing:
        found.append(
            f"no validation image of {_some(missing)}: what these are taken for is a guess, and "
            "their intervals are wide"
        )
    if chance := chance_warning(confusion):
        found.append(chance)
    if not estimate["consistent"]:
        found.append(
            "the predicted classes contradict the validation images: these are confused otherwise "
            "than the unlabeled ones, so that neither estimate nor intervals hold; calibrate with "
            "images like the unlabeled ones"
        )
    if not estimate["converged"]:
        found.append(
            "the sampler's chains do not agree yet, so that intervals may be too narrow; more "
            "validation images help"
        )
    return found


def _disagreement(name: str, other: np.ndarray, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Classes with at least half an even share by either estimate, of which the other one lies
    outside the interval by more than a point."""
    names = [row["class"] for row in rows]
    estimate, low, high = np.array([[r["estimate"], r["low"], r["high"]] for r in rows]).T
    matters = np.maximum(other, estimate) >= 0.5 / len(names)
    outside = np.maximum(low - other, other - high) > FAR
    classes = np.flatnonzero(matters & outside).tolist()
    if not classes:
        return []
    worst = max(classes, key=lambda k: abs(other[k] - estimate[k]))
    return [
        f"{name} is outside the interval for {_some([names[k] for k in classes])} (the furthest, "
        f"{names[worst]}: {100 * other[worst]:.1f} %, not {100 * low[worst]:.1f} to "
        f"{100 * high[worst]:.1f} %)"
    ]


def _some(names: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"
