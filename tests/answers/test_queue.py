"""The queue of images to label next, on sets where the right answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from simpro_fast.answers.queue import choose, choose_apart, class_weights


def test_rare_classes_weigh_more() -> None:
    weights = class_weights([80, 10, 10], [0.1, 0.7, 0.2])
    np.testing.assert_allclose(weights, [1 / 0.9, 1 / 0.8, 1 / 0.3])
    unseen = class_weights([100, 100, 0], [1, 1, 0])
    assert unseen[2] == pytest.approx(1 / (0.1 / 3)) and np.isfinite(unseen).all()


def test_the_most_uncertain_of_every_class_and_the_rare_class_first() -> None:
    classes = np.repeat([0, 1, 2], [50, 50, 3])
    uncertainty = np.concatenate([np.linspace(0, 1, 50), np.linspace(1, 0, 50), [0.1, 0.3, 0.2]])
    got = choose(classes, uncertainty, np.array([1.0, 1.0, 4.0]), 12, seed=0)
    assert got[:3].tolist() == [101, 102, 49]  # 4, 4/3, then 1 of class 0
    for k, first in ((0, [49, 48, 47, 46, 45]), (1, [50, 51, 52, 53]), (2, [101, 102, 100])):
        assert got[classes[got] == k].tolist() == first
    assert len(set(got.tolist())) == 12


def test_places_are_dealt_by_weight_and_every_beginning_is_fair() -> None:
    classes = np.tile(np.arange(3), 100)
    weights = np.array([1.0, 2.0, 4.0])
    got = classes[choose(classes, np.zeros(300), weights, 70, seed=1)]
    assert np.bincount(got).tolist() == [10, 20, 40]
    for length in range(1, 70):
        fair = weights / 7 * length
        assert (np.abs(np.bincount(got[:length], minlength=3) - fair) <= 1).all()


def test_what_is_no_candidate_and_what_chance_decides() -> None:
    classes = np.array([0, -1, 0, 0, 1])
    everything = choose(classes, np.zeros(5), np.ones(2), 9, seed=0)
    assert sorted(everything.tolist()) == [0, 2, 3, 4]
    many = np.zeros(100, np.int64)
    one, same, other = (choose(many, np.zeros(100), np.ones(1), 9, seed=s) for s in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()
    ranked = [choose(many, np.arange(100.0), np.ones(1), 9, seed=s).tolist() for s in (1, 2)]
    assert ranked[0] == ranked[1] == list(range(99, 90, -1))


def test_near_duplicates_take_one_place() -> None:
    rng = np.random.default_rng(0)
    scenes = rng.random((6, 32))
    # Ten frames of each of six scenes; those of scene 0 are the least certain.
    features = np.repeat(scenes, 10, axis=0) + 0.01 * rng.random((60, 32))
    uncertainty = np.repeat([9.0, 5, 4, 3, 2, 1], 10) + rng.random(60)
    classes, asked = np.zeros(60, np.int64), list[int]()

    def features_of(places: np.ndarray) -> np.ndarray:
        asked.extend(places.tolist())
        return features[places]

    got = choose_apart(classes, uncertainty, np.ones(1), 4, seed=0, features_of=features_of)
    assert (got // 10).tolist() == [0, 1, 2, 3]
    best = [int(uncertainty[10 * s : 10 * s + 10].argmax()) + 10 * s for s in range(4)]
    assert got.tolist() == best
    assert len(asked) == len(set(asked)) == 60  # 16 first, then all, none twice
    got = choose_apart(classes, uncertainty, np.ones(1), 30, seed=0, features_of=features_of)
    assert sorted(got // 10) == list(range(6))  # the rest would be copies


def test_images_without_any_content_are_each_others_copies() -> None:
    flat = choose(
        np.zeros(5, np.int64), np.arange(5.0), np.ones(1), 5, seed=0, features=np.ones((5, 3))
    )
    assert flat.tolist() == [4]
