"""The trials of attack.py: every attempt of every kind must be survived."""

from __future__ import annotations

import pytest

from tests.survival.attack import attempts, is_slow, trials

KINDS = [
    pytest.param(kind, marks=pytest.mark.slow if is_slow(kind) else (), id=kind.replace(" ", "_"))
    for kind in trials()
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_is_survived(kind: str) -> None:
    found = [attempt for function in trials()[kind] for attempt in attempts(function)]
    assert found, "nothing was tried"
    assert not [attempt for attempt in found if attempt.complaint is not None]
