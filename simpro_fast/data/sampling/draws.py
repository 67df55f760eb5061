"""All randomness of the data: pure functions of (seed, stream, step, place).

A place is a number in the endless stream of draws, or in the global batch of one step; what is
drawn are positions in the lists of the split.

Numbers come from numpy's Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) as raw 64-bit words. The key is (seed, stream); the 256-bit counter is
(block, step, lane, purpose), with four words to a block. So any word is found without drawing
those before it: a rank computes its own slice only, a resumed run needs no saved state, and the
words of a view depend on neither the batch size nor the number of views or ranks.

Integers below n are (u * n) >> 32 for a 32-bit u, coins and signs are single bits: no rejection,
so slices stay aligned, and nothing depends on how numpy's distributions are written.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from simpro_kernels.augment.operations import LEVELS, LOWEST_LEVEL, Operation

from simpro_fast.data.batch import AugmentConfig, LoaderSettings

Array = np.ndarray
Order = Callable[[int, int], Array]
"""Positions for `count` places of the endless stream of draws from `start` on."""

WORDS_PER_VIEW = 12
"""64-bit words of a view, a multiple of 4: 5 for the policy, 7 for crops of files (crops.py)."""
STORED_PERMUTATION_MAX = 1 << 20
"""Largest set whose permutation of a pass is kept in memory (8 bytes an image)."""

MASK32 = np.uint64(0xFFFFFFFF)
"""The low half of a word."""


class Stream(IntEnum):
    """Independent random streams of one seed. Numbers are part of a run's identity: only append."""

    ORDER_LABELED = 0
    ORDER_UNLABELED = 1
    CLASS_CHOICE = 2
    AUGMENT_LABELED = 3
    AUGMENT_UNLABELED = 4
    REPLACEMENT = 7
    METHOD = 8
    SHARES = 9
    CACHED_VIEW = 10


class _Purpose(IntEnum):
    """Last word of the counter: keeps the uses of one stream apart."""

    WORDS = 0
    SORT_KEYS = 1
    ROUND_KEYS = 2


class _Own(threading.local):
    """A generator per thread, set anew before each use: a new one first gathers entropy in vain."""

    def __init__(self) -> None:
        self.generator = np.random.Philox(0)


_own = _Own()
_NOTHING_BUFFERED = np.zeros(4, np.uint64)


def raw_words(
    seed: int,
    stream: Stream,
    step: int,
    *,
    start_block: int = 0,
    count: int,
    lane: int = 0,
    purpose: int = _Purpose.WORDS,
) -> Array:
    """`count` random words uint64 from block `start_block` (four words each) of a step."""
    generator = _own.generator
    generator.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([start_block, step, lane, purpose], np.uint64),
            "key": np.array([seed, stream], np.uint64),
        },
        "buffer": _NOTHING_BUFFERED,
        "buffer_pos": len(_NOTHING_BUFFERED),
        "has_uint32": 0,
        "uinteger": 0,
    }
    return generator.random_raw(count)


def uniforms(seed: int, step: int, kind: int, *, start: int, count: int, each: int) -> Array:
    """Draw a method's numbers for the images of a step: float32 [count, each] in [0, 1).

    Args:
        kind: 0 for labeled images, 1 for unlabeled ones.
        start: place of the first of these images in the global batch.
    """
    blocks = -(-each // 4)
    words = raw_words(
        seed, Stream.METHOD, step, start_block=start * blocks, count=4 * count * blocks, lane=kind
    )
    # 24 bits are what float32 holds below 1.
    fractions = (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return fractions.reshape(count, 4 * blocks)[:, :each]


def below(u32: Array, n: int | Array) -> Array:
    """Map 32-bit words (in uint64) to int64 0..n-1 by (u * n) >> 32."""
    return ((u32 * np.asarray(n, np.uint64)) >> np.uint64(32)).astype(np.int64)


class Permutation:
    """A keyed pseudo-random permutation of 0..n-1, evaluated at any places.

    Small sets: the stable argsort of Philox words. Large ones: a balanced Feistel network on the
    next even number of bits, re-applied while it leaves the range ("cycle walking", Black and
    Rogaway, CT-RSA 2002), which needs no memory.
    """

    ROUNDS = 8

    def __init__(
        self,
        n: int,
        seed: int,
        stream: Stream,
        pass_index: int,
        *,
        stored_max: int = STORED_PERMUTATION_MAX,
    ) -> None:
        self.n = n
        self._order: Array | None = None
        if n <= stored_max:
            keys = raw_words(seed, stream, pass_index, count=n, purpose=_Purpose.SORT_KEYS)
            self._order = np.argsort(keys, kind="stable")
        else:
            self._half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
            self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
            self._round_keys = raw_words(
                seed, stream, pass_index, count=self.ROUNDS, purpose=_Purpose.ROUND_KEYS
            )

    def __call__(self, places: Array) -> Array:
        """Positions int64 in a list of n images, for the places (int64, 0..n-1) of a pass."""
        if self._order is not None:
            return self._order[places]
        values = self._feistel(places.astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            values[outside] = self._feistel(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def _feistel(self, values: Array) -> Array:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(words: Array) -> Array:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): every bit depends on all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class ShuffledOrder:
    """An endless order of n images: one permutation per pass, passes joined without a gap.

    Every image is served once per pass, batches are always full, and a set smaller than a batch
    simply goes through several passes in it.
    """

    _CACHED_PASSES = 4

    def __init__(self, n: int, seed: int, stream: Stream) -> None:
        if n < 1:
            raise ValueError("an order needs at least one image")
        self.n = n
        self._seed = seed
        self._stream = stream
        self._passes: OrderedDict[int, Permutation] = OrderedDict()

    def __call__(self, start: int, count: int) -> Array:
        """Positions int64 [count] in the list, for places start..start+count-1 of the stream."""
        parts = []
        place, end = start, start + count
        while place < end:
            pass_index, offset = divmod(place, self.n)
            length = min(self.n - offset, end - place)
            parts.append(self._pass(pass_index)(np.arange(offset, offset + length)))
            place += length
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _pass(self, index: int) -> Permutation:
        permutation = self._passes.get(index)
        if permutation is None:
            permutation = Permutation(self.n, self._seed, self._stream, index)
            self._passes[index] = permutation
            while len(self._passes) > self._CACHED_PASSES:
                self._passes.popitem(last=False)
        return permutation


@dataclass(frozen=True)
class AugmentParams:
    """Augmentation parameters of n views; row r of every field belongs to view r."""

    flip: Array
    """bool [n]: mirror horizontally (before the crop)."""
    shift: Array
    """int64 [n, 2]: crop offset (y, x) in the reflect-padded image, 0..2*shift."""
    operation: Array
    """int64 [n, 2]: RandAugment operations in order of application, 0..13."""
    level: Array
    """int64 [n, 2]: 1..9."""
    apply: Array
    """bool [n, 2]: the coin; false leaves the image as it is."""
    negative: Array
    """bool [n, 2]: the sign of geometric operations."""
    cutout_centre: Array
    """float64 [n, 2]: (y, x) in pixels, uniform in [0, side)."""

    def __len__(self) -> int:
        return len(self.flip)

    def as_lists(self) -> dict[str, list]:
        """Plain lists for a report."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @classmethod
    def from_lists(cls, lists: dict[str, list]) -> AugmentParams:
        """The inverse of `as_lists`."""
        return cls(**{field.name: np.asarray(lists[field.name]) for field in fields(cls)})


def augment_params(
    seed: int,
    stream: Stream,
    step: int,
    *,
    start: int,
    count: int,
    num_views: int,
    augment: AugmentConfig,
) -> AugmentParams:
    """Parameters of the views of the places start..start+count-1 in the global batch of a step.

    Rows are view-major, [num_views * count]. View v has its own lane of the counter, so that
    neither the number of views nor the batch size changes what a view gets.
    """
    words = np.concatenate(
        [
            raw_words(
                seed,
                stream,
                step,
                start_block=start * WORDS_PER_VIEW // 4,
                count=count * WORDS_PER_VIEW,
                lane=view,
            ).reshape(count, WORDS_PER_VIEW)[:, :5]
            for view in range(num_views)
        ]
    )
    # Rows are fields here, as numpy is slow on short ones. Low and high halves of the words in
    # turns: shift, operation and level twice, centre of the cutout.
    halves = np.empty((8, len(words)), np.uint64)
    np.bitwise_and(words[:, :4].T, MASK32, out=halves[0::2])
    np.right_shift(words[:, :4].T, np.uint64(32), out=halves[1::2])
    shifts, operations = 2 * augment.max_shift + 1, len(Operation)
    ranges = np.array([shifts, shifts, operations, LEVELS, operations, LEVELS])
    drawn = below(halves[:6], ranges[:, None])
    bits = (words[:, 4] >> np.arange(5, dtype=np.uint64)[:, None]) & np.uint64(1) != 0
    return AugmentParams(
        flip=bits[0] & augment.flip,
        shift=drawn[:2].T,
        operation=drawn[2::2].T,
        level=drawn[3::2].T + LOWEST_LEVEL,
        apply=bits[1:3].T,
        negative=bits[3:5].T,
        cutout_centre=halves[6:].T * (augment.image_size / 2.0**32),
    )


@dataclass(frozen=True)
class StepDraws:
    """Everything random about one rank's share of one step."""

    step: int
    labeled_positions: Array
    """int64 [b] in `Split.labeled`."""
    unlabeled_positions: Array
    """int64 [m] in `Split.unlabeled`."""
    labeled_views: AugmentParams
    """[L*b] rows, view-major; view 0 is the weak one."""
    unlabeled_views: AugmentParams
    """[(1+V)*m] rows, view-major; view 0 is the weak one."""


def positions_of(
    settings: LoaderSettings, step: int, labeled: Order, unlabeled: Order
) -> tuple[Array, Array]:
    """This rank's images of a step: positions int64 [b] in `Split.labeled`, [m] in `.unlabeled`."""
    place = step * settings.world_size + settings.rank
    b, m = settings.layout.labeled, settings.layout.unlabeled
    return labeled(place * b, b), unlabeled(place * m, m)


class StepSampler:
    """The draws of any step for one rank; calling it twice gives the same answer.

    Args:
        settings: its seed, its sizes, and its rank, whose slice of the global batch is drawn.
        labeled_order: of the positions in `Split.labeled`, see `sampling.labeled_order`.
        num_unlabeled: length M of `Split.unlabeled`.
        augment: ranges of the augmentation parameters.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        labeled_order: Order,
        *,
        num_unlabeled: int,
        augment: AugmentConfig,
    ) -> None:
        self._settings, self._layout, self._augment = settings, settings.layout, augment
        self._labeled_order = labeled_order
        self._unlabeled_order = ShuffledOrder(num_unlabeled, settings.seed, Stream.ORDER_UNLABELED)

    def __call__(self, step: int) -> StepDraws:
        """This rank's draws of `step` (counted from 0)."""
        layout, b, m = self._layout, self._layout.labeled, self._layout.unlabeled
        labeled, unlabeled = positions_of(
            self._settings, step, self._labeled_order, self._unlabeled_order
        )
        return StepDraws(
            step=step,
            labeled_positions=labeled,
            unlabeled_positions=unlabeled,
            labeled_views=self._views(Stream.AUGMENT_LABELED, step, b, layout.labeled_views),
            unlabeled_views=self._views(Stream.AUGMENT_UNLABELED, step, m, 1 + layout.strong_views),
        )

    def _views(self, stream: Stream, step: int, count: int, num_views: int) -> AugmentParams:
        return augment_params(
            self._settings.seed,
            stream,
            step,
            start=self._settings.rank * count,
            count=count,
            num_views=num_views,
            augment=self._augment,
        )
