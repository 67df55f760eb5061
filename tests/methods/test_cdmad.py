"""CDMAD against loops written from its formulas."""

import math

import pytest
import torch
from torch import Tensor, nn

from simpro_fast.config.methods import CDMADConfig
from simpro_fast.methods import CDMAD, Heads
from tests.methods.oracles import softmax
from tests.methods.settings import setting


def draws(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int) -> Tensor:
        return torch.randn(rows, 3, generator=g, dtype=torch.float64) * 2

    targets = torch.randint(3, (6,), generator=g)
    names = {"logits_labeled": 12, "logits_weak": 9, "logits_strong": 18, "logits_constant": 1}
    return {"targets": targets, **{name: logits(rows) for name, rows in names.items()}}


@pytest.mark.parametrize("threshold", [0.0, 0.8])
def test_losses_and_pseudo_labels_before_and_after_the_correction(threshold: float) -> None:
    config = CDMADConfig(threshold=threshold, correct_after=0.4)
    method = CDMAD(config, setting(alpha=0.5, periods=5))
    corrected = []
    pi_u = [1 / 3] * 3
    for period in range(6):
        method.phase = method.phase_at(period)
        given = draws(period)
        for name in ("logits_labeled", "logits_weak", "logits_strong", "logits_constant"):
            given[name].requires_grad_()
        out = method(**given)
        out.loss.backward()
        assert given["logits_weak"].grad is None and given["logits_constant"].grad is None

        bias = given["logits_constant"][0].tolist()
        mass, labels, loss = [0.0] * 3, [], 0.0
        for i in range(9):
            row = given["logits_weak"][i].tolist()
            taken = [v - g * (period > 2) for v, g in zip(row, bias, strict=True)]
            q = softmax(taken)
            labels.append(q.index(max(q)))
            assert out.mask[i].item() == (max(q) >= threshold)
            if max(q) >= threshold:
                mass = [m + v for m, v in zip(mass, q, strict=True)]
                for strong in (given["logits_strong"][i], given["logits_strong"][9 + i]):
                    p = softmax(strong.tolist())
                    loss -= sum(a * math.log(b) for a, b in zip(q, p, strict=True)) / 18
        plain = sum(
            -math.log(softmax(given["logits_labeled"][r].tolist())[int(given["targets"][r % 6])])
            for r in range(12)
        )
        assert out.loss_labeled.item() == pytest.approx(plain / 12, rel=1e-12)
        assert out.loss_unlabeled.item() == pytest.approx(loss, rel=1e-12)
        assert out.loss.item() == pytest.approx(plain / 24 + loss, rel=1e-12)
        assert out.pseudo_labels.tolist() == labels
        corrected.append(labels != given["logits_weak"].argmax(1).tolist())
        method.end_period()
        pi_u = [0.9 * p + 0.1 * m / (sum(mass) + 1) for p, m in zip(pi_u, mass, strict=True)]
        assert method.pi_u.tolist() == pytest.approx(pi_u, rel=1e-12)
    assert not any(corrected[:3]) and all(corrected[3:])


def test_published_start() -> None:
    """Without correction up to period 100 of 500, which is counted from 0."""
    method = CDMAD(CDMADConfig(), setting(periods=500))
    assert [method.phase_at(p) for p in (0, 100, 101, 499)] == [0, 0, 1, 1]


def test_prediction_is_that_of_the_logits_less_those_of_the_constant_image() -> None:
    """So a constant image itself has no favourite."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4), nn.Tanh(), nn.Linear(4, 3))
    network = network.double()
    head = network[-1]
    ones, zeros = torch.ones(1, 4).double(), torch.zeros(1, 4).double()
    heads = Heads(head.weight[None], head.bias[None], ones, zeros)
    weight, bias = CDMAD(CDMADConfig(constant=-0.5), setting()).test_head(heads, network)
    images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    flat = torch.full((1, 3, 8, 8), -0.5, dtype=torch.float64)
    expected = network(images) - network(flat)
    torch.testing.assert_close(network[:-1](images) @ weight.T + bias, expected)
    nothing = network[:-1](flat) @ weight.T + bias
    torch.testing.assert_close(nothing, torch.zeros_like(nothing))


def test_nothing_labeled_nothing_confident_one_class() -> None:
    method = CDMAD(CDMADConfig(threshold=1.01), setting((5, 0, 20)))
    given = draws(1)
    given["targets"] = torch.full((6,), -100)
    out = method(**given)
    assert out.loss.item() == 0 and out.mask_rate.item() == 0
    alone = CDMAD(CDMADConfig(), setting((7,)))
    alone.phase = 1
    one = {k: v[:, :1] if k.startswith("logits") else v * 0 for k, v in given.items()}
    assert alone(**one | {"targets": torch.zeros(6, dtype=torch.int64)}).loss.item() == 0
