"""Which images a person should label next.

Three wishes at once: images that the network is unsure of, of every class and of the rare ones
first, and no two that look alike. Class k gets places by the weight

    w_k = 1 / (l_k + e_k)

with l_k its share of the labeled images and e_k its estimated share of the unlabeled ones. Places
are dealt one after another by the method of Sainte-Lague: the next goes to the class with the
largest w_k / (2 t_k + 1), t_k being the places it has, so that every beginning of the queue is as
fair as the whole. A place goes to the most uncertain image that is predicted as the class and is
not a near-duplicate of one that is in the queue already: cosine of their features, after the mean
of the candidates is taken off, of `SAME` or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

SAME = 0.98
"""Cosine from which on two images count as near-duplicates."""
_LEAST_SHARE = 0.1
"""A class counts as having at least this part of an equal share, so that none takes all."""
_POOL = 4
"""Candidates per place, of which features are looked at first."""

Measure = Literal["margin", "entropy"]


def class_weights(labeled_counts: Sequence[int], shares: Sequence[float]) -> np.ndarray:
    """w [K] as above, of counts and shares of any positive sum."""
    labeled, estimated = (np.asarray(v, np.float64) / np.sum(v) for v in (labeled_counts, shares))
    least = _LEAST_SHARE / len(labeled)
    return np.asarray(1 / np.maximum(labeled + estimated, least))


def choose(
    classes: np.ndarray,
    uncertainty: np.ndarray,
    weights: np.ndarray,
    count: int,
    *,
    seed: int,
    features: np.ndarray | None = None,
) -> np.ndarray:
    """The queue among candidates: int64 [at most count], places in the arrays.

    Args:
        classes: int [n], predicted; negative ones are no candidates.
        uncertainty: float [n], larger is more uncertain.
        weights: [K].
        seed: decides between equally uncertain images.
        features: float [n, D]; None: near-duplicates stay.
    """
    by_chance = np.random.default_rng(seed).permutation(len(classes))
    order = np.lexsort((by_chance, -uncertainty))
    waiting = [list(order[classes[order] == k][::-1]) for k in range(len(weights))]
    worth = np.where([bool(places) for places in waiting], weights, -np.inf)
    taken = np.zeros(len(weights))
    known = None if features is None else _directions(features)
    chosen: list[int] = []
    while len(chosen) < count and np.isfinite(worth).any():
        k = int(np.argmax(worth / (2 * taken + 1)))
        place = waiting[k].pop()
        if known is None or not (known[chosen] @ known[place] >= SAME).any():
            chosen.append(place)
            taken[k] += 1
        if not waiting[k]:
            worth[k] = -np.inf
    return np.array(chosen, np.int64)


def choose_apart(
    classes: np.ndarray,
    uncertainty: np.ndarray,
    weights: np.ndarray,
    count: int,
    *,
    seed: int,
    features_of: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """`choose` without near-duplicates, where the features of all images would not fit.

    Those of the most wanted candidates are asked for, and of more while places stay empty.

    Args:
        features_of: of places int64 [m] in the arrays: float [m, D].
    """
    candidates = int((classes >= 0).sum())
    size = min(_POOL * count, candidates)
    pool = choose(classes, uncertainty, weights, size, seed=seed)
    features = features_of(pool)
    while True:
        found = choose(
            classes[pool], uncertainty[pool], weights, count, seed=seed, features=features
        )
        if len(found) == count or size == candidates:
            return pool[found]
        size = min(_POOL * size, candidates)
        longer = choose(classes, uncertainty, weights, size, seed=seed)  # begins with the pool
        features = np.concatenate([features, features_of(longer[len(pool) :])])
        pool = longer


def _directions(features: np.ndarray) -> np.ndarray:
    """Unit vectors from the mean; equal images have equal ones, also where they are the mean."""
    centred = np.asarray(features, np.float64) - np.mean(features, axis=0, dtype=np.float64)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    flat = length <= 1e-12 * max(1.0, float(length.max(initial=0)))
    extra = np.where(flat, 1.0, 0.0)
    return np.hstack([np.where(flat, 0, centred / np.where(flat, 1, length)), extra])
