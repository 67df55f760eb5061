"""Which images a person should label next: the most uncertain ones, no two of which look alike.

An image is left out if it is a near-duplicate of one that is in the queue already: cosine of their
features, after the mean of the candidates is taken off, of `SAME` or more. The queue is then what
it would be if there were no copies. Places are not dealt by class: weights of the classes, by what
is rare among labeled and unlabeled images, gained no accuracy (docs/answers.md has the study).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

SAME = 0.98
"""Cosine from which on two images count as near-duplicates."""
_POOL = 4
"""Candidates per place, of which features are looked at first."""

Measure = Literal["margin", "entropy"]


def choose(
    uncertainty: np.ndarray,
    count: int,
    *,
    seed: int,
    features_of: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """The queue among candidates: int64 [at most count], places in the array, best first.

    Features of the most wanted candidates are asked for, and of more while places stay empty: those
    of all images would not fit.

    Args:
        uncertainty: float [n], larger is more uncertain; -inf is no candidate.
        seed: decides between equally uncertain images.
        features_of: of places int64 [m] in the array: float [m, D].
    """
    by_chance = np.random.default_rng(seed).permutation(len(uncertainty))
    order = np.lexsort((by_chance, -uncertainty))
    order = order[np.isfinite(uncertainty[order])]
    features: list[np.ndarray] = []
    size = 0
    while size < len(order):
        looked_at, size = size, min(_POOL * max(size, count), len(order))
        features.append(features_of(order[looked_at:size]))
        found = _apart(_directions(np.concatenate(features)), count)
        if len(found) == count:
            break
    return order[found] if size else order


def _apart(directions: np.ndarray, count: int) -> list[int]:
    """The first `count` rows of which none is like an earlier one."""
    found: list[int] = []
    for place, direction in enumerate(directions):
        if not (directions[found] @ direction >= SAME).any():
            found.append(place)
        if len(found) == count:
            break
    return found


def _directions(features: np.ndarray) -> np.ndarray:
    """Unit vectors from the mean; equal images have equal ones, also where they are the mean."""
    centred = np.asarray(features, np.float64) - np.mean(features, axis=0, dtype=np.float64)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    flat = length <= 1e-12 * max(1.0, float(length.max(initial=0)))
    extra = np.where(flat, 1.0, 0.0)
    return np.hstack([np.where(flat, 0, centred / np.where(flat, 1, length)), extra])
