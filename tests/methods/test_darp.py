"""DARP against loops and bisections written from its formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast.answers.estimation.point_shares import em_shares
from simpro_fast.config.methods import DARPConfig
from simpro_fast.methods import DARP
from simpro_fast.methods.darp import refined
from simpro_fast.utils.errors import ConfigError
from tests.equality import assert_bit_equal
from tests.methods.oracles import hard_loss, labeled_loss, micro_batches, softmax
from tests.methods.settings import setting

COUNTS = (40, 15, 5)
KEYS: dict[str, Any] = {
    "refine_after": 0.1,
    "refine_every": 3,
    "rounds": 4,
    "shares": "labeled",
}
SETTING: dict[str, Any] = {"num_unlabeled": 20, "mu": 2}


def draws(seed: int, classes: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int, scale: float) -> Tensor:
        return torch.randn(rows, classes, generator=g, dtype=torch.float64) * scale

    return {
        "targets": torch.randint(classes, (6,), generator=g),
        "logits_labeled": logits(12, 1),
        "logits_weak": logits(12, 3),
        "logits_strong": logits(24, 1),
        # An image may come twice in a step.
        "unlabeled_positions": torch.randint(20, (12,), generator=g),
    }


def root(weights: list[float], entropies: list[float], target: float) -> float:
    """By halving, of sum w exp(-nu h) = target."""

    def excess(nu: float) -> float:
        terms = [math.log(w) - nu * h for w, h in zip(weights, entropies, strict=True)]
        top = max(terms)
        return top + math.log(sum(math.exp(t - top) for t in terms)) - math.log(target)

    low, high = -1.0, 1.0
    while excess(low) < 0:
        low *= 2
    while excess(high) > 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


def slow_refined(
    table: list[list[float]], target: list[float], factor: float, rounds: int
) -> list[list[float]]:
    images, classes = range(len(table)), range(len(target))
    clean = [[0.0 for _ in classes] for _ in images]
    for k in classes:
        best = sorted(images, key=lambda n: -table[n][k])[: math.floor(factor * target[k])]
        total = sum(table[n][k] for n in best)
        for n in best:
            clean[n][k] = table[n][k] * (target[k] + 1e-6) / (total + 1e-6)
    for n in images:
        total = sum(v + 1e-6 for v in clean[n])
        clean[n] = [(v + 1e-6) / total for v in clean[n]]
    entropies = [-sum(v * math.log(v + 1e-6) for v in row) for row in clean]
    nu = [1.0 for _ in classes]
    for _ in range(rounds):
        x = []
        for n in images:
            y = [math.exp(-v * entropies[n]) for v in nu]
            x.append(1 / sum(clean[n][k] / math.e * y[k] for k in classes))
        nu = [
            root([clean[n][k] / math.e * x[n] for n in images], entropies, target[k])
            for k in classes
        ]
    found = []
    for n in images:  # the rows once more
        row = [clean[n][k] * math.exp(-nu[k] * entropies[n]) for k in classes]
        found.append([v / sum(row) for v in row])
    return found


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("factor", [2.0, 0.7])
def test_refined_is_the_slow_solution(scale: float, factor: float) -> None:
    g = torch.Generator().manual_seed(int(scale))
    table = (torch.randn(60, 4, generator=g, dtype=torch.float64) * scale).softmax(1)
    target = torch.tensor([41.0, 12.0, 6.4, 0.6], dtype=torch.float64)
    found = refined(table, target, keep_factor=factor, rounds=5)
    expected = slow_refined(table.tolist(), target.tolist(), factor, 5)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-10
    )
    torch.testing.assert_close(found.sum(1), torch.ones(60, dtype=torch.float64))
    # Many rounds make the columns right too.
    columns = refined(table, target, keep_factor=factor, rounds=300).sum(0)
    if scale < 1:
        torch.testing.assert_close(columns, target, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parts", [1, 3])
def test_losses_and_tables_over_several_periods(parts: int) -> None:
    """Also where the step comes in micro-batches; plain before period 2 of 12."""
    method = DARP(DARPConfig(threshold=0.6, **KEYS), setting(COUNTS, alpha=0.5, **SETTING))
    table = [[1 / 3] * 3 for _ in range(20)]
    target = [20 * n / 60 for n in COUNTS]
    x: list[list[float]] = []
    corrected = 0
    for step in range(25):
        if method.phase != method.phase_at(step // 5):
            method.phase = method.phase_at(step // 5)
            method.enter_phase(1, None)  # type: ignore[arg-type]
            x = slow_refined(table, target, 2.0, 4)
        assert method.phase == (step >= 10)
        given = draws(step)
        outs = []
        for small in micro_batches(given, parts):
            for name in ("logits_labeled", "logits_weak", "logits_strong"):
                small[name].requires_grad_()
            outs.append(method(**small))
            outs[-1].loss.backward()
            assert small["logits_weak"].grad is None
        mask, labels = [], []
        for i, position in enumerate(given["unlabeled_positions"].tolist()):
            p = softmax(given["logits_weak"][i].tolist())
            q = x[position] if x else p
            labels.append(q.index(max(q)))
            mask.append(max(q) >= 0.6)
            corrected += labels[-1] != p.index(max(p))
        for i, position in enumerate(given["unlabeled_positions"].tolist()):
            table[position] = softmax(given["logits_weak"][i].tolist())
        labeled = labeled_loss(given)
        loss = hard_loss(given["logits_strong"], labels, mask)
        assert sum(o.loss_labeled.item() for o in outs) / parts == pytest.approx(labeled)
        assert sum(o.loss_unlabeled.item() for o in outs) / parts == pytest.approx(loss, abs=1e-12)
        total = sum(o.loss.item() for o in outs) / parts
        assert total == pytest.approx(labeled / 2 + loss)
        assert torch.cat([o.mask for o in outs]).tolist() == mask
        assert torch.cat([o.pseudo_labels for o in outs]).tolist() == labels
        method.end_step(step)
        if x and step % 3 == 2:
            x = slow_refined(table, target, 2.0, 4)
        # The table is float32.
        torch.testing.assert_close(method.table[:-1], torch.tensor(table))
        if step % 5 == 4:
            method.end_period()
    assert corrected > 20


def test_shares_of_ones_own() -> None:
    method = DARP(DARPConfig(shares=(1, 1, 2)), setting(COUNTS, **SETTING))
    assert method.target.tolist() == [5, 5, 10]
    with pytest.raises(ConfigError, match=r"method\.shares: 2 numbers for 3 classes"):
        DARP(DARPConfig(shares=(1, 1)), setting(COUNTS))
    with pytest.raises(ValueError, match="above 0"):
        DARPConfig(shares=(1, 0, 1))


def test_shares_are_estimated_when_refinement_begins() -> None:
    """From calibrated answers under the labeled shares; saved, as a resumed run asks not again."""
    g = torch.Generator().manual_seed(0)
    true = torch.tensor([100, 300, 600])
    labels = torch.repeat_interleave(torch.arange(3), true)
    seen = torch.randn(1000, 3, generator=g, dtype=torch.float64)
    seen[torch.arange(1000), labels] += 2  # log p(x | y) is 2 x_y and a constant
    prior = torch.tensor(COUNTS, dtype=torch.float64) / 60

    class Tools:
        def logits(self, kind: str) -> Tensor:
            assert kind == "unlabeled"
            return 2 * seen + prior.log()

    method = DARP(DARPConfig(), setting(COUNTS, **{**SETTING, "num_unlabeled": 1000}))
    method.enter_phase(1, Tools())  # type: ignore[arg-type]
    estimate = em_shares((2 * seen + prior.log()).softmax(1).numpy(), prior.numpy())
    torch.testing.assert_close(
        method.target, 1000 * torch.from_numpy(estimate.shares), rtol=1e-3, atol=0.1
    )
    assert (method.target - true).abs().max() < 60
    again = DARP(DARPConfig(), setting(COUNTS, **{**SETTING, "num_unlabeled": 1000}))
    again.load_state_dict(method.state_dict())
    assert_bit_equal(again.target, method.target)


def test_nothing_confident_no_labels_one_class() -> None:
    method = DARP(DARPConfig(threshold=1.01, **KEYS), setting((3, 0, 9), **SETTING))
    method.phase = 1
    given = draws(1)
    given["targets"] = torch.full((6,), -100)
    given["logits_weak"] *= 1000  # rows of ones and zeros
    out = method(**given)
    method.end_step(2)
    assert out.loss.item() == 0 and not out.mask.any() and not method(**given).mask.any()
    assert method.refined_confidence.isfinite().all() and method.table.isfinite().all()
    alone = DARP(DARPConfig(**KEYS), setting((7,), **SETTING))
    alone.phase = 1
    alone.refine()
    one = draws(2, classes=1) | {"targets": torch.zeros(6, dtype=torch.int64)}
    out = alone(**one)
    assert out.loss.item() == 0 and out.mask.all()


def test_state_goes_on_between_two_refinements() -> None:
    methods = [DARP(DARPConfig(**KEYS), setting(COUNTS, **SETTING)) for _ in range(2)]
    for method in methods:
        method.phase = 1
    for step in range(8):
        if step == 4:
            methods[1].load_state_dict(methods[0].state_dict())
        for method in methods if step >= 4 else methods[:1]:
            method(**draws(step))
            method.end_step(step)
        if step >= 4:
            assert_bit_equal(*(dict(m.state_dict()) for m in methods))
