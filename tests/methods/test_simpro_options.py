"""SimPro's options beside the published recipe, against loops in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast import SimPro
from simpro_fast.config.methods import SimProConfig
from simpro_fast.methods import build_method
from tests.distributed.gloo_ranks import run_ranks
from tests.methods.oracles import micro_batches, softmax
from tests.methods.settings import setting
from tests.methods.test_methods import ARGUMENTS, COUNTS, logits

OPTIONS: list[dict[str, Any]] = [
    {"labeled_weight": 8.0},
    {"prior_rows": "all"},
    {"labeled_weight": 8.0, "prior_rows": "all"},
]


def one_period(
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    pi_u: list[float],
    phi: list[float],
    *,
    tau: float,
    threshold: float,
    momentum: float,
    labeled_weight: float = 1.0,
    prior_rows: str = "kept",
) -> tuple[list[float], list[float]]:
    """pi_u and phi after the steps of a period, written out for three classes."""
    labeled, kept, every = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for _, targets, weak, _ in steps:
        for target in targets.tolist():
            labeled[target] += labeled_weight
        for row in weak.tolist():
            q = softmax([f + tau * math.log(p) for f, p in zip(row, pi_u, strict=True)])
            for k in range(3):
                every[k] += q[k]
                kept[k] += q[k] * (max(q) >= threshold)
    mass = every if prior_rows == "all" else kept
    m = momentum
    seen = sum(labeled) + sum(kept)
    return (
        [m * pi_u[k] + (1 - m) * mass[k] / sum(mass) for k in range(3)],
        [m * phi[k] + (1 - m) * (labeled[k] + kept[k]) / seen for k in range(3)],
    )


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_priors_of_several_periods(options: dict[str, Any]) -> None:
    numbers = {"tau": 2.0, "threshold": 0.7, "momentum": 0.6}
    simpro = SimPro(COUNTS, **numbers, variant="paper", **options)
    pi_u, phi = [1 / 3] * 3, [n / 60 for n in COUNTS]
    for period in range(4):
        steps = [logits(10 * period + step) for step in range(3)]
        for step in steps:
            simpro(*step)
        simpro.update_priors()
        pi_u, phi = one_period(steps, pi_u, phi, **numbers, **options)
        torch.testing.assert_close(simpro.pi_u, torch.tensor(pi_u).double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(simpro.phi, torch.tensor(phi).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("key", "weight"), [("drawn", 1.0), ("loss", 0.25 * 4)])
def test_what_labeled_images_count(key: str, weight: float) -> None:
    config = SimProConfig(phi_counts=key)
    method = build_method(config, setting(alpha=0.25, mu=4))
    assert isinstance(method, SimPro) and method.labeled_weight == weight


@pytest.mark.parametrize("options", OPTIONS)
def test_state_goes_on_in_the_middle_of_a_period(options: dict[str, Any]) -> None:
    first, second = (SimPro(COUNTS, threshold=0.6, **options) for _ in range(2))
    for start in range(3):
        first(*logits(start))
        first.update_priors()
    first(*logits(8))
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for method in (first, second):
        method(*logits(9))
        method.update_priors()
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
        assert value.dtype == torch.float64


def test_the_published_recipe_keeps_its_state() -> None:
    assert list(SimPro(COUNTS).state_dict()) == ["pi_u", "phi", "labeled_count", "unlabeled_mass"]


def _all_rows(rank: int, world_size: int) -> dict[str, Tensor]:
    simpro = SimPro(COUNTS, threshold=0.6, **OPTIONS[-1])
    for step in range(4):
        given = dict(zip(ARGUMENTS, logits(step, b=4, n=8), strict=True))
        simpro(**list(micro_batches(given, world_size))[rank])
        if step % 2:
            simpro.update_priors()
    return simpro.state_dict()


def test_two_ranks_count_what_one_does() -> None:
    alone = _all_rows(0, 1)
    for state in run_ranks(_all_rows):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labeled_weight": 0.0}, "labeled_weight must be positive"),
        ({"prior_rows": "some"}, "prior_rows must be 'kept' or 'all', got 'some'"),
    ],
)
def test_options_without_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimPro(COUNTS, **options)
