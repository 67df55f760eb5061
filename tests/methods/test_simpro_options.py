"""SimPro's options beside the published recipe, against loops in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast import SimPro
from simpro_fast.config import load_config
from simpro_fast.config.methods import SimProConfig
from simpro_fast.errors import ConfigError
from simpro_fast.methods import build_method
from simpro_fast.methods.simpro_star import SimProStar
from tests.distributed.gloo_ranks import run_ranks
from tests.methods.oracles import micro_batches, softmax
from tests.methods.settings import setting
from tests.methods.test_methods import ARGUMENTS, COUNTS, logits

OPTIONS: list[dict[str, Any]] = [
    {"calibrated": True},
    {"labeled_weight": 8.0},
    {"prior_rows": "all"},
    {"hold_prior": 2},
    {"grow_momentum": True},
    {"hold_prior": 1, "grow_momentum": True, "prior_rows": "all", "calibrated": True},
]


def one_period(
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    pi_u: list[float],
    phi: list[float],
    update: int,
    *,
    tau: float,
    threshold: float,
    momentum: float,
    calibrated: bool = False,
    labeled_weight: float = 1.0,
    prior_rows: str = "kept",
    hold_prior: int = 0,
    grow_momentum: bool = False,
) -> tuple[list[float], list[float]]:
    """pi_u and phi after the steps of period `update`, written out for three classes."""
    labeled, kept, every = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for _, targets, weak, _ in steps:
        for target in targets.tolist():
            labeled[target] += labeled_weight
        for row in weak.tolist():
            if calibrated:
                posterior = softmax([f + tau * math.log(p) for f, p in zip(row, phi, strict=True)])
                odds = [q * u / p for q, u, p in zip(posterior, pi_u, phi, strict=True)]
                q = [value / sum(odds) for value in odds]
            else:
                q = softmax([f + tau * math.log(p) for f, p in zip(row, pi_u, strict=True)])
            for k in range(3):
                every[k] += q[k]
                kept[k] += q[k] * (max(q) >= threshold)
    mass = every if prior_rows == "all" else kept
    m = min(momentum, (1 + update) / (10 + update)) if grow_momentum else momentum
    stays = 1.0 if update < hold_prior else m
    seen = sum(labeled) + sum(kept)
    return (
        [stays * pi_u[k] + (1 - stays) * mass[k] / sum(mass) for k in range(3)],
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
        pi_u, phi = one_period(steps, pi_u, phi, period, **numbers, **options)
        torch.testing.assert_close(simpro.pi_u, torch.tensor(pi_u).double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(simpro.phi, torch.tensor(phi).double(), rtol=1e-6, atol=0)


def test_calibrated_pseudo_labels_are_the_published_ones_at_tau_one_only() -> None:
    for tau, same in ((1.0, True), (2.0, False)):
        published, calibrated = (
            SimPro(COUNTS, tau, 0.5, variant="paper", calibrated=on) for on in (False, True)
        )
        for method in (published, calibrated):
            method.pi_u.copy_(torch.tensor([0.1, 0.2, 0.7]))
        step = logits(3)
        first, second = (method(*step).class_mass for method in (published, calibrated))
        assert torch.allclose(first, second, rtol=1e-9) == same


def test_calibrated_pseudo_labels_find_the_posterior_of_what_is_trained() -> None:
    """Where softmax(f + tau log phi) is the true posterior under phi, q is the one under pi_u."""
    generator = torch.Generator().manual_seed(0)
    likelihood = torch.rand(200, 3, generator=generator, dtype=torch.float64)
    simpro = SimPro(COUNTS, 2.0, 0.0, variant="paper", calibrated=True, strong_views=1)
    simpro.phi.copy_(torch.tensor([0.6, 0.3, 0.1]))
    simpro.pi_u.copy_(torch.tensor([0.2, 0.3, 0.5]))
    f = (likelihood * simpro.phi).log() - 2 * simpro.phi.log()
    q = likelihood * simpro.pi_u
    out = simpro(f[:2], torch.tensor([0, 1]), f, f)
    torch.testing.assert_close(out.class_mass, (q / q.sum(1, keepdim=True)).sum(0))


def test_calibrated_without_adjusted_loss_divides_by_phi() -> None:
    simpro = SimPro(COUNTS, 2.0, 0.0, variant="paper", calibrated=True, adjust_loss=False)
    step = logits(4)
    q = (step[2] - simpro.phi.log() + simpro.pi_u.log()).softmax(1)
    torch.testing.assert_close(simpro(*step).class_mass, q.sum(0))


@pytest.mark.parametrize(("key", "weight"), [("drawn", 1.0), ("alpha", 0.25), ("loss", 0.25 * 4)])
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


def test_an_anchor_is_chosen_by_what_was_seen() -> None:
    """Whatever the momentum of the first periods: the uniform start does not count."""
    truth = torch.tensor([5.0, 15.0, 40.0]).double() / 60
    for options in ({}, {"grow_momentum": True}, {"hold_prior": 2}):
        star = SimProStar(COUNTS, anchor_after=5, **options)
        for _ in range(5):
            star.unlabeled_mass += 1e6 * truth
            star.labeled_count += 1
            star.update_priors()
        assert star.choose_anchor() == "reversed", options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibrated": True, "adjust_pseudo_labels": False}, "calibrated=True has no meaning"),
        ({"labeled_weight": 0.0}, "labeled_weight must be positive"),
        ({"prior_rows": "some"}, "prior_rows must be 'kept' or 'all', got 'some'"),
        ({"hold_prior": -1}, "hold_prior must not be negative, got -1"),
    ],
)
def test_options_without_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimPro(COUNTS, **options)


def test_the_same_from_the_configuration_is_one_line() -> None:
    both = ["method.calibrated=true", "method.adjust_pseudo_labels=false"]
    with pytest.raises(ConfigError, match=r"^method: .*calibrated=true has no meaning"):
        load_config("digits_lt/reversed", both)
    star = ["method.name=simpro_star", "method.hold_prior=5"]
    with pytest.raises(ConfigError, match=r"^method: .*hold_prior=5 .* below anchor_after=5"):
        load_config("digits_lt/reversed", star)
