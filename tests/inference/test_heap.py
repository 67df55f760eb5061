"""Sampling of a stream, and when estimators are said to disagree."""

from __future__ import annotations

import numpy as np

from simpro_fast.inference.heap import Reservoir, _disagreement, sample
from simpro_fast.inference.sources import Item


def test_a_sample_keeps_the_order_and_prefers_nobody() -> None:
    items = [Item(str(i), "", str(i)) for i in range(40)]
    counts = np.zeros(40)
    for seed in range(600):
        chosen = [int(item.path) for item in sample(iter(items), 10, seed)]
        assert chosen == sorted(chosen) and len(chosen) == 10
        counts[chosen] += 1
    # 150 expected, standard deviation 10.6
    assert counts.min() > 150 - 5 * 10.6 and counts.max() < 150 + 5 * 10.6
    assert sample(iter(items), 100, 1) == items


def test_chunks_do_not_change_a_reservoir() -> None:
    whole, parts = Reservoir(5, 3), Reservoir(5, 3)
    expected = whole.places(50)
    found = np.concatenate([parts.places(n) for n in (7, 1, 42)])
    assert len(found) == len(expected) and (found[:5] == np.arange(5)).all()
    assert found.max() < 5 and expected.max() < 5 and whole.seen == parts.seen == 50


def test_only_classes_that_matter_and_are_far_outside_are_warned_of() -> None:
    names = ["cats", "dogs", "owls", "rare"]
    estimate = np.array([0.5, 0.3, 0.19, 0.01])
    low, high = estimate - 0.02, estimate + 0.02

    def said_of(*shift: float) -> list[str]:
        return _disagreement("EM", estimate + np.array(shift), estimate, low, high, names)

    assert said_of(0.025, 0, 0, 0.05) == []
    (said,) = said_of(0.1, -0.1, 0, 0)
    assert "cats, dogs" in said and "owls" not in said
    (said,) = said_of(0, 0, 0, 0.3)
    assert "rare" in said
