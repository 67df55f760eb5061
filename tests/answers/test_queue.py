"""The queue of images to label next, on sets where the right answer is known."""

from __future__ import annotations

import numpy as np

from simpro_fast.answers.queue import choose


def unlike(places: np.ndarray) -> np.ndarray:
    """Features of which no two are alike."""
    return np.random.default_rng(0).normal(size=(1000, 64))[places]


def test_the_most_uncertain_first_and_what_is_no_candidate() -> None:
    uncertainty = np.array([0.1, -np.inf, 0.4, 0.2, 0.3])
    assert choose(uncertainty, 3, seed=0, features_of=unlike).tolist() == [2, 4, 3]
    assert choose(uncertainty, 9, seed=0, features_of=unlike).tolist() == [2, 4, 3, 0]
    assert choose(uncertainty[1:2], 9, seed=0, features_of=unlike).tolist() == []


def test_chance_decides_between_equally_uncertain_images() -> None:
    one, same, other = (
        choose(np.zeros(100), 9, seed=s, features_of=unlike).tolist() for s in (1, 1, 2)
    )
    assert one == same != other and len(set(one)) == 9
    ranked = [choose(np.arange(100.0), 9, seed=s, features_of=unlike).tolist() for s in (1, 2)]
    assert ranked[0] == ranked[1] == list(range(99, 90, -1))


def test_near_duplicates_take_one_place() -> None:
    rng = np.random.default_rng(0)
    scenes = rng.random((6, 32))
    # Ten frames of each of six scenes; those of scene 0 are the least certain.
    features = np.repeat(scenes, 10, axis=0) + 0.01 * rng.random((60, 32))
    uncertainty = np.repeat([9.0, 5, 4, 3, 2, 1], 10) + rng.random(60)
    asked = list[int]()

    def features_of(places: np.ndarray) -> np.ndarray:
        asked.extend(places.tolist())
        return features[places]

    got = choose(uncertainty, 4, seed=0, features_of=features_of)
    assert (got // 10).tolist() == [0, 1, 2, 3]
    best = [int(uncertainty[10 * s : 10 * s + 10].argmax()) + 10 * s for s in range(4)]
    assert got.tolist() == best
    assert len(asked) == len(set(asked)) == 60  # 16 first, then all, none twice
    got = choose(uncertainty, 30, seed=0, features_of=features_of)
    assert sorted(got // 10) == list(range(6))  # the rest would be copies


def test_copies_of_one_image_take_no_place_from_its_class() -> None:
    """40 copies on top of class 0; both classes have 160 more images, equally uncertain."""
    uncertainty = np.concatenate([np.full(40, 2.0), np.linspace(1, 0, 320)])
    classes = np.concatenate([np.zeros(40, int), np.tile([1, 0], 160)])

    def features_of(places: np.ndarray) -> np.ndarray:
        return unlike(np.maximum(places, 39))

    for count in (4, 20, 100):
        got = choose(uncertainty, count, seed=0, features_of=features_of)
        assert got[0] < 40 and np.bincount(classes[got]).tolist() == [count / 2, count / 2]
        assert got[1:].tolist() == list(range(40, 39 + count))


def test_images_without_any_content_are_each_others_copies() -> None:
    flat = choose(np.arange(5.0), 5, seed=0, features_of=lambda places: np.ones((len(places), 3)))
    assert flat.tolist() == [4]
