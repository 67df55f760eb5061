"""Which labeled image comes when: the four values of `data.sampling`, and how often each class did.

With n labeled images in a class, a drawn image is of that class with a probability proportional to

    class_balanced      1
    square_root         sqrt(n)
    effective_number    n / E(n),  E(n) = (1 - beta^n) / (1 - beta)

E is the effective number of samples of Cui et al. (CVPR 2019): every image has weight 1 / E of its
class, as when their loss weights are used for sampling. beta = 0 keeps the frequencies of the data,
beta -> 1 makes the classes equally frequent. `shuffle` serves every image once per pass instead.
"""

from __future__ import annotations

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.sampling.draws import MASK32, Order, ShuffledOrder, Stream, below, raw_words

Array = np.ndarray
_CHUNK = 1 << 20


def class_weights(data: DataConfig, counts: Array) -> Array:
    """Weight float64 [K] of every class under a class-first `data.sampling`; 0 without images.

    Args:
        counts: int64 [K], labeled images per class.
    """
    n = counts.astype(np.float64)
    if data.sampling == "class_balanced":
        return (counts > 0).astype(np.float64)
    if data.sampling == "square_root":
        return np.sqrt(n)
    if data.sampling == "effective_number":
        # 1 - beta^n without cancellation; numpy's log(0) = -inf gives 1, as it should.
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = -np.expm1(n * np.log(np.float64(data.sampling_beta)))
            return np.where(counts > 0, n * (1.0 - data.sampling_beta) / kept, 0.0)
    raise ValueError(f"data.sampling={data.sampling} has no class weights")


class ClassFirstOrder:
    """A class first, then an image of it, independently for each place in the stream.

    Class weights become thresholds on a 32-bit word, the cumulative shares times 2^32 rounded down,
    so that a choice is one comparison of integers: a class gets its probability within 2^-32.
    The image within the class is uniform by (u * n) >> 32, see `draws`.

    Args:
        labels: int64 [N], 0..K-1, of the labeled positions.
        weights: float64 [K], not negative; 0 where a class has no image.
    """

    def __init__(self, labels: Array, weights: Array, seed: int) -> None:
        counts = np.bincount(labels, minlength=len(weights))
        self._classes = np.flatnonzero(weights)
        self._counts = counts[self._classes]
        if not self._counts.all():
            raise ValueError("a class without images has a weight")
        self._positions = np.argsort(labels, kind="stable")
        self._starts = (np.cumsum(counts) - counts)[self._classes]
        cumulative = np.cumsum(weights[self._classes])
        self._thresholds = np.floor(cumulative / cumulative[-1] * 2.0**32).astype(np.uint64)
        self._seed = seed

    def __call__(self, start: int, count: int) -> Array:
        """Labeled positions int64 [count] for the places start..start+count-1 of the stream."""
        first_block = start // 4
        words = raw_words(
            self._seed,
            Stream.CLASS_CHOICE,
            0,
            start_block=first_block,
            count=start + count - 4 * first_block,
        )[start - 4 * first_block :]
        chosen = np.searchsorted(self._thresholds, words & MASK32, side="right")
        within = below(words >> np.uint64(32), self._counts[chosen])
        return self._positions[self._starts[chosen] + within]


class OneThenOther:
    """The first places of the stream by one order, all others by another one from its start."""

    def __init__(self, one: Order, places: int, other: Order) -> None:
        self._one, self._places, self._other = one, places, other

    def __call__(self, start: int, count: int) -> Array:
        """Labeled positions int64 [count] for the places start..start+count-1 of the stream."""
        of_one = min(max(self._places - start, 0), count)
        parts = [self._one(start, of_one)] if of_one else []
        if of_one < count:
            parts.append(self._other(start + of_one - self._places, count - of_one))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def labeled_order(data: DataConfig, labels: Array, num_classes: int, seed: int) -> Order:
    """The order under `data.sampling`; labels int64 [N] of the labeled positions."""
    counts = np.bincount(labels, minlength=num_classes)
    order: Order
    if data.sampling == "shuffle":
        order = ShuffledOrder(len(labels), seed, Stream.ORDER_LABELED)
    else:
        order = ClassFirstOrder(labels, class_weights(data, counts), seed)
    if not data.class_balanced_steps:
        return order
    balanced = ClassFirstOrder(labels, (counts > 0).astype(np.float64), seed)
    return OneThenOther(balanced, data.class_balanced_steps * data.batch_size, order)


class LabeledDraws:
    """How often each class was drawn, over all ranks: like the draws a function of the steps."""

    def __init__(self, data: DataConfig, labels: Array, num_classes: int, seed: int) -> None:
        self._labels, self._num_classes, self._batch = labels, num_classes, data.batch_size
        self._order = labeled_order(data, labels, num_classes, seed)

    def counts(self, first: int, stop: int) -> list[int]:
        """Labeled images per class in the steps first..stop-1."""
        total = np.zeros(self._num_classes, np.int64)
        for start in range(first * self._batch, stop * self._batch, _CHUNK):
            count = min(_CHUNK, stop * self._batch - start)
            drawn = self._labels[self._order(start, count)]
            total += np.bincount(drawn, minlength=self._num_classes)
        return total.tolist()
