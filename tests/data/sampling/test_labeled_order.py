"""Every value of `data.sampling`: weights, frequencies, golden draws, ranks, counts per class."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import AugmentConfig, LoaderSettings
from simpro_fast.data.sampling.draws import StepSampler
from simpro_fast.data.sampling.labeled_order import (
    ClassFirstOrder,
    LabeledDraws,
    class_weights,
    labeled_order,
)

COUNTS = np.array([90, 0, 1, 9])
LABELS = np.repeat([2, 0, 3], [1, 90, 9])  # in no order of the classes; class 1 is empty
MODES = ("shuffle", "class_balanced", "square_root", "effective_number")
BETA = 0.99


def config(sampling: str, **options: object) -> DataConfig:
    return DataConfig(sampling=sampling, sampling_beta=BETA, **options)


def shares(sampling: str) -> np.ndarray:
    """Probability of each class, from the definitions in the plainest arithmetic."""
    n = [90, 0, 1, 9]
    effective = [(1 - BETA**k) / (1 - BETA) if k else 1.0 for k in n]
    weights = {
        "shuffle": n,
        "class_balanced": [1, 0, 1, 1],
        "square_root": [k**0.5 for k in n],
        "effective_number": [k / e for k, e in zip(n, effective, strict=True)],
    }[sampling]
    return np.array(weights) / sum(weights)


def frequencies_p(labels: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(labels, minlength=4)
    assert not counts[expected == 0].any(), "a class without images was drawn"
    kept = expected > 0
    return float(chisquare(counts[kept], len(labels) * expected[kept]).pvalue)


@pytest.mark.parametrize("sampling", MODES[1:])
def test_class_weights(sampling: str) -> None:
    weights = class_weights(config(sampling), COUNTS)
    np.testing.assert_allclose(weights / weights.sum(), shares(sampling), rtol=1e-12)
    assert weights[1] == 0


@pytest.mark.parametrize(
    ("beta", "like"), [(0.0, [90, 0, 1, 9]), (1 - 1e-15, [1, 0, 1, 1]), (0.9999, None)]
)
def test_effective_number_goes_from_the_data_to_balanced(
    beta: float, like: list[int] | None
) -> None:
    data = DataConfig(sampling="effective_number", sampling_beta=beta)
    weights = class_weights(data, COUNTS)
    if like is not None:
        np.testing.assert_allclose(weights / weights.max(), np.array(like) / max(like), rtol=1e-2)
    huge = class_weights(data, np.array([10**9, 1]))
    assert np.isfinite(huge).all(), "no overflow and no cancellation"
    assert huge[1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sampling", "golden"),
    [
        ("shuffle", [32, 60, 92, 52, 77, 26, 46, 42, 4, 97, 11, 67]),
        ("class_balanced", [0, 31, 0, 96, 95, 0, 0, 96, 0, 0, 58, 92]),
        ("square_root", [39, 31, 67, 96, 0, 40, 2, 96, 10, 66, 58, 0]),
        ("effective_number", [0, 31, 0, 96, 95, 0, 2, 96, 10, 66, 58, 92]),
    ],
)
def test_golden_draws(sampling: str, golden: list[int]) -> None:
    """The identity of every run: a change here is another experiment under the same seed."""
    assert labeled_order(config(sampling), LABELS, 4, 1)(5, 12).tolist() == golden


@pytest.mark.parametrize("sampling", MODES)
def test_frequencies_of_classes_and_of_images_within_them(sampling: str) -> None:
    order = labeled_order(config(sampling), LABELS, 4, 1)
    images = order(0, 60_000)
    # A permutation per pass is more even than chance; that is no fault of it.
    assert frequencies_p(LABELS[images], shares(sampling)) > 1e-4
    head = images[LABELS[images] == 0] - 1
    assert chisquare(np.bincount(head, minlength=90)).pvalue > 1e-4
    assert np.array_equal(order(1001, 37), images[1001:1038]), "found without the rest"


@pytest.mark.parametrize("sampling", MODES)
def test_ranks_share_one_stream_and_each_sees_the_same_frequencies(sampling: str) -> None:
    world, steps = 4, 500

    def source(rank: int, world: int) -> StepSampler:
        data = config(sampling).model_copy(update={"batch_size": 64, "mu": 1})
        settings = LoaderSettings(
            data=data, seed=3, labeled_views=1, strong_views=1, rank=rank, world_size=world
        )
        order = labeled_order(data, LABELS, 4, 3)
        return StepSampler(settings, order, num_unlabeled=50, augment=AugmentConfig(32, 4, True))

    whole = source(0, 1)
    slices = [source(rank, world) for rank in range(world)]
    drawn = [[one(step) for step in range(steps)] for one in slices]
    for step in (0, 1, 499):
        for name in ("labeled_positions", "unlabeled_positions"):
            joined = np.concatenate([getattr(one[step], name) for one in drawn])
            assert np.array_equal(joined, getattr(whole(step), name))
    for one in drawn:
        labels = LABELS[np.concatenate([draws.labeled_positions for draws in one])]
        assert frequencies_p(labels, shares(sampling)) > 1e-4
        unlabeled = np.concatenate([draws.unlabeled_positions for draws in one])
        assert chisquare(np.bincount(unlabeled, minlength=50)).pvalue > 1e-4
        views = [draws.unlabeled_views for draws in one[:200]]
        for name, low, categories in (
            ("operation", 0, 14),
            ("level", 1, 9),
            ("shift", 0, 9),
            ("flip", 0, 2),
            ("apply", 0, 2),
        ):
            values = np.concatenate([getattr(view, name).reshape(-1) for view in views])
            counts = np.bincount(values.astype(int) - low, minlength=categories)
            assert len(counts) == categories
            assert chisquare(counts).pvalue > 1e-4, name


def test_a_class_without_images_has_no_weight() -> None:
    with pytest.raises(ValueError, match="without images"):
        ClassFirstOrder(LABELS, np.ones(4), 1)


@pytest.mark.parametrize("sampling", MODES)
def test_counts_are_those_of_the_steps(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpro_fast.data.sampling.labeled_order._CHUNK", 100)
    data = config(sampling, batch_size=7)
    draws = LabeledDraws(data, LABELS, 4, 1)
    images = labeled_order(data, LABELS, 4, 1)(0, 7 * 60)
    expected = np.bincount(LABELS[images[7 * 3 : 7 * 50]], minlength=4)
    assert draws.counts(3, 50) == expected.tolist()
    assert sum(draws.counts(3, 50)) == 7 * 47
    parts = np.array(draws.counts(0, 3)) + draws.counts(3, 50) + draws.counts(50, 60)
    assert parts.tolist() == draws.counts(0, 60)
    assert draws.counts(5, 5) == [0, 0, 0, 0]


@pytest.mark.parametrize("sampling", ["shuffle", "square_root"])
def test_balanced_at_first_then_as_it_says(sampling: str) -> None:
    """The first steps are those of class_balanced, the others start the usual order."""
    data = config(sampling, class_balanced_steps=3, batch_size=8)
    order = labeled_order(data, LABELS, 4, 1)
    balanced = labeled_order(config("class_balanced"), LABELS, 4, 1)
    usual = labeled_order(config(sampling), LABELS, 4, 1)
    whole = order(0, 200)
    np.testing.assert_array_equal(whole, np.concatenate([balanced(0, 24), usual(0, 176)]))
    for start, count in ((0, 24), (20, 4), (20, 9), (24, 5), (23, 1), (100, 60), (24, 0)):
        np.testing.assert_array_equal(order(start, count), whole[start : start + count])
    counted = LabeledDraws(data, LABELS, 4, 1).counts(2, 4)
    assert counted == np.bincount(LABELS[whole[16:32]], minlength=4).tolist()
