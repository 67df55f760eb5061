"""Splits against the published counts, and the errors around them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.class_counts import long_tailed_counts, unlabeled_counts
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import ConfigError
from tests.data.toy_split import config, make_dataset

# Counts of the published splits. All are worked examples of the released rule.

LABELED = {
    (500, 150, 10): [500, 286, 164, 94, 53, 30, 17, 10, 5, 3],
    (500, 100, 10): [500, 299, 179, 107, 64, 38, 23, 13, 8, 5],
    (450, 10, 10): [450, 348, 269, 208, 161, 125, 96, 75, 58, 45],
    (450, 20, 10): [450, 322, 231, 165, 118, 85, 61, 43, 31, 22],
}
UNLABELED_150 = {
    "consistent": [4000, 2292, 1313, 752, 431, 247, 141, 81, 46, 26],
    "uniform": [4000] * 10,
    "reversed": [26, 46, 81, 141, 247, 431, 752, 1313, 2292, 4000],
    "middle": [46, 141, 431, 1313, 4000, 2292, 752, 247, 81, 26],
    "head_tail": [2292, 752, 247, 81, 26, 46, 141, 431, 1313, 4000],
    "random": [81, 46, 2292, 247, 752, 431, 1313, 4000, 26, 141],
}
UNLABELED_100 = {
    "consistent": [4000, 2397, 1437, 861, 516, 309, 185, 111, 66, 40],
    "uniform": [4000] * 10,
    "reversed": [40, 66, 111, 185, 309, 516, 861, 1437, 2397, 4000],
    "middle": [66, 185, 516, 1437, 4000, 2397, 861, 309, 111, 40],
    "head_tail": [2397, 861, 309, 111, 40, 66, 185, 516, 1437, 4000],
    "random": [111, 66, 2397, 309, 861, 516, 1437, 4000, 40, 185],
}
# CIFAR-100, gamma 20, N1 50, as (value, classes with it).
CIFAR100_LABELED = [
    *((n, 1) for n in (50, 48, 47, 45, 44, 42, 41, 40, 39, 38, 36, 35, 34, 33, 32, 31, 30)),
    *((29, 2), (28, 1), (27, 1), (26, 1), (25, 1), (24, 2), (23, 1), (22, 2), (21, 1), (20, 2)),
    *((19, 1), (18, 2), (17, 2), (16, 2), (15, 2), (14, 3), (13, 2), (12, 3), (11, 3), (10, 3)),
    *((9, 3), (8, 4), (7, 4), (6, 6), (5, 6), (4, 7), (3, 9), (2, 7)),
]


@pytest.mark.parametrize(("arguments", "counts"), LABELED.items(), ids=str)
def test_labeled_counts(arguments: tuple[int, int, int], counts: list[int]) -> None:
    assert long_tailed_counts(*arguments) == counts


@pytest.mark.parametrize("gamma, table", [(150, UNLABELED_150), (100, UNLABELED_100)])
def test_unlabeled_counts(gamma: int, table: dict[str, list[int]]) -> None:
    for distribution, counts in table.items():
        assert unlabeled_counts(distribution, 4000, gamma, 10, seed=0) == counts, distribution


def test_cifar100_counts() -> None:
    labeled = long_tailed_counts(50, 20, 100)
    assert [(n, len(list(run))) for n, run in groupby(labeled)] == CIFAR100_LABELED
    assert sum(labeled) == 1545
    consistent = unlabeled_counts("consistent", 400, 20, 100, 0)
    assert consistent[:6] == [400, 388, 376, 365, 354, 343]
    assert consistent[47:53] == [96, 93, 90, 88, 85, 82]
    assert consistent[-6:] == [23, 22, 21, 21, 20, 20]
    assert sum(consistent) == 12719
    assert unlabeled_counts("reversed", 400, 20, 100, 0) == consistent[::-1]
    middle = unlabeled_counts("middle", 400, 20, 100, 0)
    assert middle[:6] == [20, 21, 23, 24, 26, 27]
    assert middle[47:53] == [354, 376, 400, 388, 365, 343]
    assert middle[-6:] == [27, 25, 23, 22, 21, 20]
    head_tail = unlabeled_counts("head_tail", 400, 20, 100, 0)
    assert head_tail[:6] == [388, 365, 343, 323, 304, 286]
    assert head_tail[47:53] == [22, 21, 20, 20, 21, 23]
    assert head_tail[-6:] == [295, 313, 333, 354, 376, 400]
    assert sum(long_tailed_counts(50, 10, 100)) == 1911
    assert sum(long_tailed_counts(400, 10, 100)) == 15651


def test_random_is_a_pure_function_of_the_seed() -> None:
    import random

    first = unlabeled_counts("random", 4000, 100, 10, seed=7)
    random.seed(99)
    state = random.getstate()
    assert unlabeled_counts("random", 4000, 100, 10, seed=7) == first
    assert random.getstate() == state
    assert unlabeled_counts("random", 4000, 100, 10, seed=8) != first
    assert sorted(first) == sorted(UNLABELED_100["consistent"])


# Index lists


def test_split_seed_draws_rows_anew_and_nothing_else() -> None:
    dataset = make_dataset([40, 40, 40], test_sizes=None)
    keys = {"unlabeled_distribution": "reversed", "test_per_class": 6}
    published, *drawn = (
        make_split(config(**keys, split_seed=seed), dataset, seed=run)
        for seed, run in ((None, 1), (1, 1), (2, 1), (1, 9))
    )
    lists = [(s.labeled.tolist(), s.unlabeled.tolist(), s.test.tolist()) for s in drawn]
    assert lists[0] == lists[2]  # whatever the run's seed
    for split, rows in zip(drawn, lists, strict=True):
        assert split.labeled_counts == published.labeled_counts
        assert split.unlabeled_counts == published.unlabeled_counts
        flat = [row for part in rows for row in part]
        assert len(set(flat)) == len(flat)
    for one, other in zip(lists[0], lists[1], strict=True):
        assert set(one) != set(other)


def test_first_n_then_next_m_of_each_class() -> None:
    dataset = make_dataset([12, 12, 12], test_sizes=[5, 5, 5])
    split = make_split(config(unlabeled_distribution="reversed"), dataset, seed=1)
    assert split.labeled_counts == (4, 2, 2)
    assert split.unlabeled_counts == (4, 5, 8)
    position = 0
    for k, (n, m) in enumerate(zip((4, 2, 2), (4, 5, 8), strict=True)):
        own = np.flatnonzero(dataset.labels == k)
        at = sum((4, 2, 2)[:k])
        assert split.labeled[at : at + n].tolist() == own[:n].tolist()
        assert split.unlabeled[position : position + m].tolist() == own[n : n + m].tolist()
        position += m
    assert split.test.tolist() == list(range(15))
    assert split.test_counts == (5, 5, 5)
    assert {part.dtype for part in (split.labeled, split.unlabeled, split.test)} == {
        np.dtype("int64")
    }


def test_overlap_puts_the_labeled_images_into_the_unlabeled_set() -> None:
    dataset = make_dataset([12, 12, 12], test_sizes=[1, 1, 1])
    apart = make_split(config(), dataset, 1)
    joined = make_split(config(overlap=True), dataset, 1)
    assert not set(apart.labeled) & set(apart.unlabeled)
    assert set(joined.unlabeled) == set(apart.labeled) | set(apart.unlabeled)
    assert joined.unlabeled_counts == (4 + 8, 2 + 5, 2 + 4)
    assert "disjoint from labeled" in apart.summary()
    assert "includes the labeled images" in joined.summary()
    assert apart.hash() != joined.hash()


def test_held_out_test_images_are_the_last_of_each_class() -> None:
    dataset = make_dataset([16, 16])
    split = make_split(config(test_per_class=3), dataset, 1)
    expected = [np.flatnonzero(dataset.labels == k)[-3:] for k in range(2)]
    assert split.test.tolist() == np.concatenate(expected).tolist()
    assert not set(split.test) & (set(split.labeled) | set(split.unlabeled))


def test_digits_split_of_the_demo() -> None:
    dataset = load_dataset(DataConfig(name="digits"))
    data = DataConfig(
        name="digits",
        labeled_max=40,
        unlabeled_max=100,
        gamma_labeled=20.0,
        unlabeled_distribution="reversed",
        test_per_class=40,
    )
    split = make_split(data, dataset, 1)
    assert split.labeled_counts == (40, 28, 20, 14, 10, 7, 5, 3, 2, 2)
    assert split.unlabeled_counts == (5, 6, 9, 13, 18, 26, 36, 51, 71, 100)
    assert split.test_counts == (40,) * 10
    everything = np.concatenate([split.labeled, split.unlabeled, split.test])
    assert len(np.unique(everything)) == len(everything)


def test_hash_is_over_little_endian_lists() -> None:
    import hashlib

    lists = [np.array([1, 2]), np.array([3]), np.array([], np.int64)]
    split = Split(
        *lists, labeled_counts=(2,), unlabeled_counts=(1,), test_counts=(0,), overlap=False
    )
    raw = b"".join(int(i).to_bytes(8, "little") for i in (1, 2, 3))
    assert split.hash() == hashlib.sha256(raw).hexdigest()
    swapped = Split(  # type: ignore[call-arg]
        lists[0].astype(">i8"),
        *lists[1:],
        (2,),
        unlabeled_counts=(1,),
        test_counts=(0,),
        overlap=False,
    )
    assert swapped.hash() == split.hash()


# Errors


@pytest.mark.parametrize(
    ("values", "sizes", "tested", "message"),
    [
        (
            {"gamma_labeled": 1.0},
            *([10, 12], [1, 1]),
            r"class 0 \(name0\): 4 labeled \+ 8 unlabeled = 12 images wanted, 10 found; lower "
            r"data\.labeled_max=4 or data\.unlabeled_max=8",
        ),
        ({"gamma_labeled": 1.0, "test_per_class": 3}, [12, 12], None, "found besides 3 test im"),
        (
            {"unlabeled_distribution": "uniform", "gamma_unlabeled": 2.0},
            *([16, 16], [1, 1]),
            "gamma_unlabeled=2 contradicts .*uniform",
        ),
        ({}, [20, 20], None, r"toy has no test part; set data\.test_per_class"),
        ({"test_per_class": 40}, [60, 20], None, r"class 1 \(name1\): 40 test images wanted, 20"),
        ({}, [20], [1], "1 class: .*at least 2"),
    ],
)
def test_what_cannot_be_cut_is_named(
    values: dict[str, Any], sizes: list[int], tested: list[int] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_split(config(**values), make_dataset(sizes, test_sizes=tested), 1)


@pytest.mark.parametrize("gamma", [0.5, float("nan")])
def test_gamma_below_one(gamma: float) -> None:
    with pytest.raises(ConfigError, match=f"gamma={gamma:g}: .*at least 1"):
        long_tailed_counts(50, gamma, 10)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"labeled_max": 50, "unlabeled_max": 200}, "labeled"),
        ({"labeled_max": 100, "unlabeled_max": 50}, "unlabeled"),
    ],
)
def test_a_class_of_zero_images(values: dict[str, int], part: str) -> None:
    dataset = make_dataset([300] * 10, test_sizes=[1] * 10)
    data = config(gamma_labeled=100.0, **values)
    with pytest.raises(
        ConfigError,
        match=rf"data\.{part}_max=50 with gamma 100 leaves no {part} image for class 8 "
        rf"\(name8\), 2 of 10 classes in all; use data\.{part}_max >= 100",
    ):
        make_split(data, dataset, 1)
    allowed = make_split(data.model_copy(update={"allow_empty_classes": True}), dataset, 1)
    counts = allowed.labeled_counts if part == "labeled" else allowed.unlabeled_counts
    assert counts is not None and counts[7:] == (counts[7], 0, 0)


def test_the_unlabeled_set_has_its_own_gamma() -> None:
    dataset = make_dataset([16, 16], test_sizes=[1, 1])
    split = make_split(config(gamma_unlabeled=4.0), dataset, 1)
    assert (split.labeled_counts, split.unlabeled_counts) == ((4, 2), (8, 2))
