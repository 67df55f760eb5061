"""Class shares of unlabeled images by several estimators, from a stream of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from simpro_fast.answers.estimation.bayesian import bayesian_shares
from simpro_fast.answers.estimation.point_shares import black_box_shares, em_shares
from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.predict import classify, item_pixels
from simpro_fast.answers.sources import Item
from simpro_fast.data.files.decode import OK
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


def sample(items: Iterable[Item], size: int, seed: int) -> list[Item]:
    """`size` items drawn evenly from a stream of any length, in its order."""
    reservoir, kept = Reservoir(size, seed), dict[int, tuple[int, Item]]()
    for number, item in enumerate(items):
        if (place := int(reservoir.places(1)[0])) >= 0:
            kept[place] = (number, item)
    return [item for _, item in sorted(kept.values(), key=lambda pair: pair[0])]


@dataclass
class Predicted:
    """Predictions of a set of unlabeled images."""

    predicted: np.ndarray
    """int64 [K] images by argmax f(x)."""
    probability: np.ndarray
    """float64 [K], the sum of softmax(f)."""
    logits: np.ndarray
    """float32 [n, K] of images drawn evenly, for EM."""
    bad: Counter[str] = field(default_factory=Counter)
    first_bad: str = ""

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
    found_images = Predicted(
        np.zeros(classes, np.int64), np.zeros(classes), np.empty((0, classes), np.float32)
    )
    reservoir, done = Reservoir(size, seed), 0
    pixels_of = partial(item_pixels, size=model.file.image_size)
    for chunk in classify(model, items, pixels_of, batch_size=batch_size, threads=threads):
        logits = chunk.logits[chunk.readable]
        found_images.predicted += np.bincount(logits.argmax(axis=1), minlength=classes)
        found_images.probability += model.probabilities(logits).sum(axis=0)
        if len(found_images.logits) < (needed := min(size, reservoir.seen + len(logits))):
            room = np.empty((min(size, 2 * needed), classes), np.float32)
            room[: len(found_images.logits)] = found_images.logits
            found_images.logits = room
        for row, place in zip(logits, reservoir.places(len(logits)), strict=True):
            if place >= 0:
                found_images.logits[place] = row
        for item, said in zip(chunk.items, chunk.status, strict=True):
            if said != OK:
                found_images.bad[said.partition(":")[0]] += 1
                found_images.first_bad = found_images.first_bad or f"{item.path}: {said}"
        done += len(chunk.items)
        progress(done)
    found_images.logits = found_images.logits[: min(size, reservoir.seen)]
    if not found_images.images:
        said = f"no image could be read (first: {found_images.first_bad})"
        raise UserError(
            f"{said if found_images.bad else 'the folders hold no image'}; check the paths"
        )
    return found_images


def estimates(
    model: TrainedModel, found_images: Predicted, confusion: np.ndarray | None, seed: int
) -> dict[str, Any]:
    """The rows of shares.json and what is to be said about them.

    Args:
        confusion: validation counts [K, K]; None: a point estimate without an interval.

    Returns:
        `method`, `rows` ({class, estimate, low, high, method, predicted, black_box, em,
        mean_posterior, pi_u}: shares of 1, null where there is none), `converged`, `em_images`,
        `warnings`.
    """
    file, warnings = model.file, []
    mean_posterior = found_images.probability / found_images.images
    em = em_shares(model.probabilities(found_images.logits, file.phi), np.array(file.phi))
    pi_u = np.array(file.pi_u) / sum(file.pi_u)
    if not em.converged:
        warnings.append("EM did not converge; its shares are where it stopped")
    low = high = black_box = None
    converged = True
    if confusion is None:
        method, estimate = "mean_posterior", mean_posterior
        warnings.append(
            "without validation images there is no interval, and nothing says how far the estimate "
            "is off; give --calibrate VAL, some images of every class with known classes"
        )
    else:
        found = bayesian_shares(confusion, found_images.predicted, seed=seed)
        method, estimate, low, high = "bayesian", found.estimate, found.low, found.high
        black_box, converged = black_box_shares(confusion, found_images.predicted), found.converged
        warnings += _doubts(model.class_names, confusion, found.converged)
        for name, other in (("EM", em.shares), ("pi_u of the training", pi_u)):
            warnings += _disagreement(name, other, estimate, low, high, model.class_names)
    columns = {
        "estimate": estimate,
        "low": low,
        "high": high,
        "predicted": found_images.predicted / found_images.images,
        "black_box": black_box,
        "em": em.shares,
        "mean_posterior": mean_posterior,
        "pi_u": pi_u,
    }
    return {
        "method": method,
        "level": None if low is None else 0.95,
        "converged": converged,
        "em_images": len(found_images.logits),
        "rows": [
            {
                "class": name,
                **{key: None if v is None else float(v[k]) for key, v in columns.items()},
                "method": method,
            }
            for k, name in enumerate(model.class_names)
        ],
        "warnings": warnings,
    }


def _doubts(names: Sequence[str], confusion: np.ndarray, converged: bool) -> list[str]:
    found = []
    missing = [names[k] for k in np.flatnonzero(confusion.sum(axis=1) == 0).tolist()]
    if missing:
        found.append(
            f"no validation image of {_some(missing)}: what these are taken for is a guess, and "
            "their intervals are wide"
        )
    if not converged:
        found.append(
            "the sampler's chains do not agree yet, so that intervals may be too narrow; more "
            "validation images help"
        )
    return found


def _disagreement(
    name: str,
    other: np.ndarray,
    estimate: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    names: Sequence[str],
) -> list[str]:
    """Classes with at least half an even share by either estimate, of which the other one lies
    outside the interval by more than a point."""
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
