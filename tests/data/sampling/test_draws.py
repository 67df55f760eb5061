"""Draws are pure functions of (seed, stream, step, position), uniform, and sliced by rank."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import AugmentConfig, LoaderSettings
from simpro_fast.data.sampling.draws import (
    WORDS_PER_VIEW,
    AugmentParams,
    Permutation,
    ShuffledOrder,
    StepSampler,
    Stream,
    augment_params,
    raw_words,
    uniforms,
)

GOLDEN_WORDS = ["0x4db6a27b756282df", "0xd944fa03babe0e2f"]
GOLDEN_ORDER = [0, 3, 6, 8, 2, 5, 1, 7, 9, 4]
GOLDEN_OPERATIONS = [[0, 10], [1, 8], [11, 1]]
SETTINGS = AugmentConfig(image_size=32, max_shift=4, flip=True)


def source(rank: int = 0, world: int = 1, seed: int = 3) -> StepSampler:
    data = DataConfig(batch_size=8, mu=3)
    settings = LoaderSettings(data=data, seed=seed, rank=rank, world_size=world)
    order = ShuffledOrder(13, seed, Stream.ORDER_LABELED)
    return StepSampler(settings, order, num_unlabeled=26, augment=SETTINGS)


def draws(
    count: int, num_views: int = 1, start: int = 0, step: int = 0, seed: int = 0
) -> AugmentParams:
    return augment_params(
        seed,
        Stream.AUGMENT_UNLABELED,
        step,
        start=start,
        count=count,
        num_views=num_views,
        augment=SETTINGS,
    )


def uniform_p(values: np.ndarray, categories: int) -> float:
    counts = np.bincount(values.reshape(-1), minlength=categories)
    assert len(counts) == categories, "a value outside the range"
    return chisquare(counts).pvalue


def test_words_are_philox_and_found_by_position() -> None:
    whole = raw_words(5, Stream.AUGMENT_LABELED, 7, count=400)
    reference = np.random.Philox(
        key=[5, int(Stream.AUGMENT_LABELED)], counter=[0, 7, 0, 0]
    ).random_raw(400)
    assert np.array_equal(whole, reference)
    part = raw_words(5, Stream.AUGMENT_LABELED, 7, start_block=25, count=300)
    assert np.array_equal(whole[100:], part)
    assert WORDS_PER_VIEW % 4 == 0


def test_golden_words() -> None:
    """The identity of every run: a change here is another experiment under the same seed."""
    assert [hex(word) for word in raw_words(1, Stream.ORDER_LABELED, 0, count=2)] == GOLDEN_WORDS
    assert ShuffledOrder(10, 1, Stream.ORDER_UNLABELED)(0, 10).tolist() == GOLDEN_ORDER
    assert draws(3, seed=1).operation.tolist() == GOLDEN_OPERATIONS


def test_seed_stream_step_and_view_change_everything() -> None:
    base = raw_words(1, Stream.AUGMENT_LABELED, 0, count=64)
    others = [
        raw_words(2, Stream.AUGMENT_LABELED, 0, count=64),
        raw_words(1, Stream.AUGMENT_UNLABELED, 0, count=64),
        raw_words(1, Stream.AUGMENT_LABELED, 1, count=64),
        raw_words(1, Stream.AUGMENT_LABELED, 0, count=64, lane=1),
    ]
    for other in others:
        assert not np.isin(other, base).any()
    first = {int(raw_words(seed, stream, 0, count=1)[0]) for seed in range(50) for stream in Stream}
    assert len(first) == 50 * len(Stream)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_slices_concatenate_to_the_one_rank_draws(world: int) -> None:
    for step in (0, 1, 17):
        whole = source()(step)
        parts = [source(rank, world)(step) for rank in range(world)]
        for name in ("labeled_positions", "unlabeled_positions"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(joined, getattr(whole, name))
        for name, views in (("labeled_views", 2), ("unlabeled_views", 3)):
            for field in fields(AugmentParams):
                split = [
                    getattr(getattr(part, name), field.name) for part in parts
                ]  # each [views * count, ...]
                by_view = [part.reshape(views, -1, *part.shape[1:]) for part in split]
                joined = np.concatenate(by_view, axis=1)
                expected = getattr(getattr(whole, name), field.name)
                assert np.array_equal(joined.reshape(expected.shape), expected)


def test_views_depend_on_neither_batch_size_nor_number_of_views() -> None:
    small, large = draws(5, num_views=2, start=10), draws(40, num_views=4)
    for field in fields(AugmentParams):
        a, b = getattr(small, field.name), getattr(large, field.name)
        assert np.array_equal(a[:5], b[10:15])
        assert np.array_equal(a[5:], b[50:55])


def test_case_10_seeds_change_the_order_and_repeat_it() -> None:
    orders = {
        seed: ShuffledOrder(8, seed, Stream.ORDER_UNLABELED)(0, 24).tolist() for seed in (1, 2)
    }
    assert orders[1] != orders[2]
    assert orders[1] == ShuffledOrder(8, 1, Stream.ORDER_UNLABELED)(0, 24).tolist()
    passes = [tuple(orders[1][start : start + 8]) for start in (0, 8, 16)]
    assert len(set(passes)) == 3, "each pass has its own permutation"
    assert all(sorted(one) == list(range(8)) for one in passes)


def test_case_8_small_sets_always_give_full_batches() -> None:
    """26 images, 4 ranks, 6 each, 50 steps: full batches, every image as often as any other."""
    ranks = [ShuffledOrder(26, 1, Stream.ORDER_UNLABELED) for _ in range(4)]
    served = np.concatenate(
        [ranks[rank]((step * 4 + rank) * 6, 6) for step in range(50) for rank in range(4)]
    )
    assert served.shape == (50 * 24,)
    counts = np.bincount(served, minlength=26)
    assert counts.max() - counts.min() <= 1
    # Each pass over the global stream covers the set once.
    for start in range(0, len(served) - 26, 26):
        assert len(set(served[start : start + 26])) == 26
    assert len(ShuffledOrder(3, 1, Stream.ORDER_LABELED)(0, 64)) == 64


@given(
    n=st.integers(1, 700),
    seed=st.integers(0, 2**63 - 1),
    pass_index=st.integers(0, 2**40),
    stored=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_permutation_is_one(n: int, seed: int, pass_index: int, stored: bool) -> None:
    permutation = Permutation(
        n, seed, Stream.ORDER_LABELED, pass_index, stored_max=n if stored else 0
    )
    assert np.array_equal(np.sort(permutation(np.arange(n))), np.arange(n))


def test_feistel_positions_are_uniform_and_passes_independent() -> None:
    """Where images 0..9 of 100 land over 4,000 keys, and that neighbours do not stay together."""
    landed = np.stack(
        [
            Permutation(100, 0, Stream.ORDER_LABELED, key, stored_max=0)(np.arange(10))
            for key in range(4000)
        ]
    )
    for position in range(10):
        assert uniform_p(landed[:, position], 100) > 1e-4
    gaps = (landed[:, 1] - landed[:, 0]) % 100
    assert uniform_p(gaps - 1, 99) > 1e-4


def test_feistel_serves_a_billion_images_without_a_list() -> None:
    n = 1_000_000_007
    order = ShuffledOrder(n, 1, Stream.ORDER_UNLABELED)
    images = np.concatenate([order(n - 3, 6), order(10**12, 20_000)])
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(images)
    assert uniform_p(images[6:] * 20 // n, 20) > 1e-4


def test_view_parameters_are_uniform() -> None:
    many = draws(40_000)
    assert uniform_p(many.operation[:, 0] * 14 + many.operation[:, 1], 196) > 1e-4
    assert uniform_p(many.level - 1, 9) > 1e-4
    assert uniform_p(many.shift, 9) > 1e-4
    for name in ("apply", "negative"):
        bits = getattr(many, name)
        assert uniform_p(bits[:, 0] * 2 + bits[:, 1].astype(int), 4) > 1e-4
    coins = many.flip * 8 + many.apply[:, 0] * 4 + many.negative[:, 0] * 2 + many.negative[:, 1]
    assert uniform_p(coins.astype(int), 16) > 1e-4
    joint = (many.level[:, 0] - 1) * 14 + many.operation[:, 0]
    assert uniform_p(joint, 126) > 1e-4
    centre = np.floor(many.cutout_centre).astype(int)
    assert uniform_p(centre[:, 0] * 32 + centre[:, 1], 1024) > 1e-4


def test_the_cost_of_a_rank_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words drawn by one rank of 1,000 for the same share of a large set."""
    drawn = []
    original = raw_words

    def counting(*args: object, **kwargs: object) -> np.ndarray:
        words = original(*args, **kwargs)
        drawn.append(len(words))
        return words

    monkeypatch.setattr("simpro_fast.data.sampling.draws.raw_words", counting)
    totals = []
    for world in (1, 1000):
        data = DataConfig(batch_size=4 * world, mu=8)
        settings = LoaderSettings(data=data, rank=world - 1, world_size=world)
        order = ShuffledOrder(2_000_000, 1, Stream.ORDER_LABELED)
        one = StepSampler(settings, order, num_unlabeled=10**9, augment=SETTINGS)
        drawn.clear()
        one(5)
        totals.append(sum(drawn))
    assert totals[0] == totals[1]


def test_uniforms_of_a_method_do_not_depend_on_the_ranks() -> None:
    whole = uniforms(3, 17, 1, start=0, count=40, each=3)
    parts = [uniforms(3, 17, 1, start=rank * 10, count=10, each=3) for rank in range(4)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert whole.dtype == np.float32 and whole.shape == (40, 3)
    for seed, step, kind in ((4, 17, 1), (3, 18, 1), (3, 17, 0)):
        other = uniforms(seed, step, kind, start=0, count=40, each=3)
        assert not np.isclose(whole, other).any(1).all()
    many = uniforms(1, 0, 0, start=0, count=20_000, each=2)
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005 and abs(np.corrcoef(many.T)[0, 1]) < 0.02
