"""ACR against loops written from its formulas, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast.config.methods import ACRConfig, ACRNoAnchorsConfig
from simpro_fast.methods import ACR, ACRNoAnchors, Heads
from simpro_fast.methods.anchors import anchors, labeled_prior, symmetric_kl
from tests.methods.oracles import softmax
from tests.methods.settings import setting

COUNTS = (40, 15, 5)


def build(cls: Any = ACR, counts: tuple[int, ...] = COUNTS, alpha: float = 1.0, **keys: Any) -> Any:
    config = (ACRConfig if cls is ACR else ACRNoAnchorsConfig)(threshold=0.6, **keys)
    return cls(config, setting(counts, alpha=alpha))


def step(seed: int, scale: float = 2.0, classes: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [rows, 2, K] of 2 views of 6 labeled, 9 weak and 2 views of 9 strong, float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, 2, classes, generator=g, dtype=torch.float64) * scale

    targets = torch.randint(classes, (6,), generator=g)
    return draw(12), targets, draw(9), draw(18)


def cross_entropy(row: list[float], target: int) -> float:
    return -math.log(softmax(row)[target])


class Oracle:
    """ACR for one rank, with lists and loops."""

    def __init__(self, counts: tuple[int, ...], period: int, released: bool, adapts: bool) -> None:
        counts_seen = [max(1, c) for c in counts]
        self.pi = [c / sum(counts_seen) for c in counts_seen]
        ranks = sorted(range(len(counts)), key=lambda k: -self.pi[k])
        turned = [0.0] * len(counts)
        for r, k in enumerate(ranks):
            turned[k] = self.pi[ranks[-1 - r]]
        self.anchors = [self.pi, [1 / len(counts)] * len(counts), turned]
        self.u = [1 / len(counts)] * len(counts)
        self.tau, self.period, self.released, self.adapts = 2.0, period, released, adapts
        self.sums, self.seen = [0.0] * 3, 0

    def step(self, labeled: Any, targets: Any, weak: Any, strong: Any) -> dict[str, Any]:
        """Loss, masks and pseudo-labels, with the threshold 0.6 and adjustments of 2."""
        classes, images = range(len(self.pi)), len(weak)
        first = sum(cross_entropy(row[0], targets[i % 6]) for i, row in enumerate(labeled))
        second = sum(
            cross_entropy([row[1][k] + 2 * math.log(self.pi[k]) for k in classes], targets[i % 6])
            for i, row in enumerate(labeled)
        )
        masks, given, confident = [], [], []
        self.last: dict[int, bool] = {}
        for a, b in weak:
            for_a = [a[k] - self.tau * math.log(self.pi[k]) for k in classes]
            for_b = [a[k] - 2 * math.log(self.pi[k]) for k in classes]
            sure = [max(softmax(row)) >= 0.6 for row in (for_a, a, for_b, b)]
            masks.append((sure[0] or sure[1], sure[2] or sure[3]))
            given.append((for_a.index(max(for_a)), for_b.index(max(for_b))))
            self.last[list(b).index(max(b))] = sure[3]
            if sure[3]:
                confident.append(list(b).index(max(b)))
        unlabeled = sum(
            cross_entropy(row[head], given[i % images][head])
            for i, row in enumerate(strong)
            for head in (0, 1)
            if masks[i % images][head]
        )
        self.confident = confident
        return {
            "labeled": (first + second) / len(labeled),
            "unlabeled": unlabeled / len(strong),
            "masks": masks,
            "given": given,
        }

    def end_step(self) -> None:
        count = [float(self.confident.count(k)) for k in range(len(self.pi))]
        if self.released:
            count = [float(self.last.get(k, False)) for k in range(len(self.pi))]
        if not sum(count):
            return
        self.u = [0.99 * u + 0.01 * c / sum(count) for u, c in zip(self.u, count, strict=True)]
        for i, anchor in enumerate(self.anchors):
            pairs = list(zip(self.u, anchor, strict=True))
            self.sums[i] += sum(p * math.log(p / q) for p, q in pairs) / 2
            self.sums[i] += sum(q * math.log(q / p) for p, q in pairs) / 2

    def adapt(self) -> None:
        """At the start of a period in which the estimate counts."""
        if self.adapts:
            powers = [math.exp(s / self.period) for s in self.sums]
            self.tau = 2 * powers[0] / sum(powers)
        self.sums = [0.0] * 3


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("cls", [ACR, ACRNoAnchors])
@pytest.mark.parametrize("counts", [COUNTS, (5, 40, 15)])
def test_losses_targets_and_state_over_periods(
    cls: Any, variant: str, counts: tuple[int, ...]
) -> None:
    """Six periods of five steps; the estimate counts from the third on (estimate_after = 1)."""
    acr = build(cls, counts, variant=variant, estimate_after=1, alpha=0.5)
    oracle = Oracle(counts, 5, variant == "released", cls is ACR)
    for number in range(30):
        if number % 5 == 0:
            acr.phase = acr.phase_at(number // 5)
            if number == 10:
                acr.enter_phase(1, None)
            if number >= 10:
                oracle.adapt()
            assert acr.tau_target.item() == pytest.approx(oracle.tau, rel=1e-12)
        inputs = step(number)
        out = acr(*inputs)
        expected = oracle.step(*(t.tolist() for t in inputs))
        assert out.loss_labeled.item() == pytest.approx(expected["labeled"], rel=1e-9)
        assert out.loss_unlabeled.item() == pytest.approx(expected["unlabeled"], rel=1e-9)
        total = 0.5 * expected["labeled"] + expected["unlabeled"]
        assert out.loss.item() == pytest.approx(total, rel=1e-9)
        assert out.mask.tolist() == [mask[1] for mask in expected["masks"]]
        assert out.pseudo_labels.tolist() == [label[1] for label in expected["given"]]
        kept = [y[1] for y, m in zip(expected["given"], expected["masks"], strict=True) if m[1]]
        assert out.class_mass.tolist() == [kept.count(k) for k in range(3)]
        either = [any(mask) for mask in expected["masks"]]
        assert acr.confident(inputs[2]).tolist() == either and sum(either) > 0
        acr.end_step(number)
        if number >= 10:
            oracle.end_step()
        assert acr.normalised_pi_u().tolist() == pytest.approx(oracle.u, rel=1e-12)
        if number % 5 == 4:
            acr.end_period()
    assert acr.tau_target.item() == 2.0 if cls is ACRNoAnchors else acr.tau_target.item() < 2.0


def test_first_adapted_period_has_a_third_of_tau() -> None:
    acr = build(estimate_after=0)
    acr.phase = 1
    acr.enter_phase(1, None)
    assert acr.tau_target.item() == pytest.approx(2 / 3, rel=1e-15)


def test_tau_of_true_estimates_on_the_published_split() -> None:
    """CIFAR-10-LT of ratio 150 and a perfect u: 0.05 consistent, 0.83 uniform, 1.83 reversed."""
    counts = (500, 286, 164, 94, 53, 30, 17, 10, 5, 3)
    acr = build(counts=counts)
    prior = labeled_prior(counts)
    for u, expected in ((prior, 0.05), (torch.full_like(prior, 0.1), 0.83), (prior.flip(0), 1.83)):
        acr.u.copy_(u)
        acr.distance.copy_(5 * symmetric_kl(acr.u, acr.anchors))
        acr._adapt()
        assert acr.tau_target.item() == pytest.approx(expected, abs=0.02)


def test_gradients_reach_the_labeled_and_strong_logits_only() -> None:
    acr = build()
    labeled, targets, weak, strong = step(3)
    for tensor in (labeled, weak, strong):
        tensor.requires_grad_()
    out = acr(labeled, targets, weak, strong)
    out.loss.backward()
    assert weak.grad is None and labeled.grad is not None and strong.grad is not None
    assert (labeled.grad.abs().sum((0, 2)) > 0).all()
    assert not strong.grad[~out.mask.repeat(2)][:, 1].any()
    assert not any(t.requires_grad for t in (out.loss_labeled, out.loss_unlabeled, out.class_mass))


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize(
    ("counts", "scale"),
    [((5, 3, 0), 2.0), ((7,), 2.0), (COUNTS, 0.0)],
    ids=["a class without labels", "one class", "nothing confident"],
)
def test_degenerate_inputs_stay_finite(variant: str, counts: tuple[int, ...], scale: float) -> None:
    acr = build(counts=counts, variant=variant, estimate_after=0)
    for number in range(20):
        if number == 5:
            acr.phase = 1
            acr.enter_phase(1, None)
        inputs = step(number, scale, len(counts))
        for tensor in inputs[::3]:
            tensor.requires_grad_()
        out = acr(*inputs)
        out.loss.backward()
        assert out.loss.isfinite() and all(t.grad.isfinite().all() for t in inputs[::3])
        acr.end_step(number)
        if number % 5 == 4:
            acr.end_period()
    assert acr.normalised_pi_u().sum().item() == pytest.approx(1)
    assert 0 <= acr.tau_target <= 2
    if scale == 0:
        assert acr.normalised_pi_u().tolist() == pytest.approx([1 / 3] * 3, rel=1e-12)
    # An adjustment by a class that was never seen does not decide every pseudo-label.
    if len(counts) == 3 and scale:
        assert len(set(out.pseudo_labels.tolist())) > 1


def test_head_b_is_the_test_rule() -> None:
    weight, bias = torch.randn(2, 3, 4), torch.randn(2, 3)
    heads = Heads(weight, bias, torch.ones(1, 4), torch.zeros(1, 4))
    found = build().test_head(heads, torch.nn.Identity())
    assert torch.equal(found[0], weight[1]) and torch.equal(found[1], bias[1])


def test_anchors_follow_the_ranks_of_the_classes() -> None:
    prior = labeled_prior([5, 40, 15, 0])
    assert prior.tolist() == pytest.approx([5 / 61, 40 / 61, 15 / 61, 1 / 61])
    consistent, uniform, turned = (a.tolist() for a in anchors(prior))
    assert consistent == prior.tolist() and uniform == [0.25] * 4
    assert turned == pytest.approx([15 / 61, 1 / 61, 5 / 61, 40 / 61])
    head_first = labeled_prior([40, 15, 5])
    assert anchors(head_first)[2].tolist() == head_first.flip(0).tolist()
