"""SimPro*: SimPro first, then the nearest anchor for good."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast import SimPro
from simpro_fast.config.methods import SimProStarConfig
from simpro_fast.methods import SimProStar, build_method
from tests.methods.settings import setting

COUNTS = (40, 15, 5)


def inputs(seed: int, shares: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step whose weak views are sure of classes with these shares, of 60 images; float64."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(shares), 60, replacement=True, generator=g)
    weak = 8 * torch.nn.functional.one_hot(labels, len(shares)).double()
    labeled = torch.randn(12, len(shares), generator=g, dtype=torch.float64)
    strong = torch.randn(120, len(shares), generator=g, dtype=torch.float64)
    return labeled, torch.randint(len(shares), (6,), generator=g), weak, strong


def distance(p: list[float], q: list[float]) -> float:
    """The symmetrised KL divergence, written out."""
    forward = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    backward = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    return forward / 2 + backward / 2


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize(
    ("counts", "shares", "expected"),
    [
        (COUNTS, (0.7, 0.2, 0.1), [40, 15, 5]),
        (COUNTS, (0.34, 0.36, 0.3), [20, 20, 20]),
        (COUNTS, (0.1, 0.25, 0.65), [5, 15, 40]),
        ((15, 40, 5), (0.2, 0.7, 0.1), [15, 40, 5]),
        ((15, 40, 5), (0.25, 0.1, 0.65), [15, 5, 40]),
        ((5, 15, 40), (0.7, 0.2, 0.1), [40, 15, 5]),
    ],
)
def test_nearest_anchor_after_some_periods_and_for_good(
    variant: Any, counts: tuple[int, ...], shares: tuple[float, ...], expected: list[int]
) -> None:
    """Before as SimPro; then pi_u is the anchor nearest to the estimate, whatever comes later."""
    arguments: dict[str, Any] = {"tau": 1.0, "threshold": 0.5, "momentum": 0.5, "variant": variant}
    star, plain = SimProStar(counts, anchor_after=4, **arguments), SimPro(counts, **arguments)
    for period in range(4):
        assert star.phase_at(period) == 0
        for step in range(3):
            given = inputs(10 * period + step, shares)
            assert torch.equal(star(*given).loss, plain(*given).loss)
        star.update_priors()
        plain.update_priors()
    assert torch.equal(star.pi_u, plain.pi_u) and torch.equal(star.phi, plain.phi)
    # Without what is left of the uniform start: 0.5 ** 4 of it.
    left = [float(p) - 0.5**4 / 3 for p in star.pi_u]
    estimate = [p / sum(left) for p in left]
    share = [c / sum(counts) for c in counts]
    order = sorted(range(3), key=lambda k: -counts[k])
    turned = {k: share[order[-1 - r]] for r, k in enumerate(order)}
    choices = [share, [1 / 3] * 3, [turned[k] for k in range(3)]]
    nearest = min(choices, key=lambda anchor: distance(estimate, anchor))
    assert nearest == pytest.approx([c / 60 for c in expected])

    assert star.phase_at(4) == 1
    star.enter_phase(1, None)  # type: ignore[arg-type]
    for period in range(4, 7):
        given = inputs(period, (1 / 3, 1 / 3, 1 / 3))
        star(*given), plain(*given)
        star.update_priors()
        assert star.pi_u.tolist() == pytest.approx(nearest, abs=1e-15)
    # phi goes on, and the anchor is what pseudo-labels follow.
    assert not torch.equal(star.phi, plain.phi)
    weak = torch.zeros(1, 3, dtype=torch.float64)
    out = star(*inputs(9, shares)[:2], weak, weak.repeat(2, 1))
    assert nearest[int(out.pseudo_labels)] == max(nearest)


@pytest.mark.parametrize("distribution", ["consistent", "uniform", "reversed"])
def test_right_anchor_from_right_estimates_with_the_published_momentum(distribution: str) -> None:
    """Five periods at 0.9 leave 59 % of the uniform start in pi_u."""
    counts = (500, 299, 179, 107, 64, 38, 23, 13, 8, 5)
    star = SimProStar(counts, momentum=0.9)
    true = star.anchors[["consistent", "uniform", "reversed"].index(distribution)]
    for _ in range(5):
        star.accumulate(torch.zeros(64, dtype=torch.int64), 5000 * true)
        star.update_priors()
    assert star.choose_anchor() == distribution
    assert torch.equal(star.pi_u, true)


@pytest.mark.parametrize("counts", [(5, 3, 0), (7,)], ids=["a class without labels", "one class"])
def test_degenerate_inputs_stay_finite(counts: tuple[int, ...]) -> None:
    star = SimProStar(counts, tau=2.0, threshold=1.01)
    shares = tuple(1 / len(counts) for _ in counts)
    for period in range(8):
        if period == 5:
            star.choose_anchor()
        out = star(*inputs(period, shares))
        assert out.loss.isfinite() and out.loss_unlabeled == 0
        star.update_priors()
    assert (star.pi_u > 0).all() and star.normalised_pi_u().sum().item() == pytest.approx(1)


def test_nothing_confident_goes_to_the_uniform_anchor() -> None:
    star = SimProStar(COUNTS, threshold=1.01)
    for step in range(5):
        star(*inputs(step, (0.2, 0.3, 0.5)))
        star.update_priors()
    assert star.choose_anchor() == "uniform"


def test_keys_are_simpros_and_one_more() -> None:
    config = SimProStarConfig(tau=1.5, anchor_after=3, adjust_loss=False, variant="paper")
    star = build_method(config, setting(alpha=0.25, strong_views=1))
    assert isinstance(star, SimProStar) and (star.tau, star.anchor_after) == (1.5, 3)
    assert (star.alpha, star.strong_views, star.variant) == (0.25, 1, "paper")
    assert not star.adjust_loss and star.adjust_pseudo_labels
    with pytest.raises(ValueError, match="anchor_after"):
        SimProStar(COUNTS, anchor_after=-1)
