"""ABC against loops written from its formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast.config.methods import ABCConfig
from simpro_fast.methods import ABC
from tests.methods.settings import setting

COUNTS = (40, 15, 5)


def draws(seed: int, *, scale: float = 3.0) -> dict[str, Tensor]:
    """Two labeled views of 6 images, two strong ones of 9, two heads of 3 classes; float64."""
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int) -> Tensor:
        return torch.randn(rows, 2, 3, generator=g, dtype=torch.float64) * scale

    return {
        "logits_labeled": logits(12),
        "targets": torch.randint(3, (6,), generator=g),
        "logits_weak": logits(9),
        "logits_strong": logits(18),
        "uniform_labeled": torch.rand(6, 1, generator=g),
        "uniform_unlabeled": torch.rand(9, 1, generator=g),
    }


def softmax(row: Tensor) -> list[float]:
    weights = [math.exp(v - max(row.tolist())) for v in row.tolist()]
    return [w / sum(weights) for w in weights]


def cross_entropy(row: Tensor, target: list[float]) -> float:
    return -sum(q * math.log(p) for q, p in zip(target, softmax(row), strict=True))


def one_hot(k: int) -> list[float]:
    return [float(k == c) for c in range(3)]


def expected(given: dict[str, Tensor], threshold: float, over: float) -> dict[str, Any]:
    share = [min(COUNTS) / n for n in COUNTS]
    labeled = unlabeled = 0.0
    for row in range(12):
        y = int(given["targets"][row % 6])
        labeled += cross_entropy(given["logits_labeled"][row, 0], one_hot(y)) / 12
        if float(given["uniform_labeled"][row % 6, 0]) < share[y]:
            labeled += cross_entropy(given["logits_labeled"][row, 1], one_hot(y)) / 12
    mask, labels, mass, thinned = [], [], [0.0] * 3, 0
    for i in range(9):
        p, q = softmax(given["logits_weak"][i, 0]), softmax(given["logits_weak"][i, 1])
        kept = max(q) >= threshold
        mask.append(kept)
        labels.append(q.index(max(q)))
        drawn = float(given["uniform_unlabeled"][i, 0]) < 1 - over * (1 - share[labels[-1]])
        thinned += kept and not drawn
        mass = [m + v * kept for m, v in zip(mass, q, strict=True)]
        for row in (i, 9 + i):
            strong = given["logits_strong"][row]
            if max(p) >= threshold:
                unlabeled += cross_entropy(strong[0], one_hot(p.index(max(p)))) / 18
            if kept and drawn:
                unlabeled += cross_entropy(strong[1], q) / 9  # a mean for each of two views
    return {
        "labeled": labeled,
        "unlabeled": unlabeled,
        "mask": mask,
        "labels": labels,
        "mass": mass,
        "thinned": thinned,
    }


def test_losses_and_masks_in_every_period() -> None:
    method = ABC(ABCConfig(threshold=0.7, alpha=0.5), setting(COUNTS, alpha=0.5, periods=4))
    thinned = []
    for period in range(6):  # also beyond the last one
        given = draws(period)
        for logits in ("logits_labeled", "logits_strong"):
            given[logits].requires_grad_()
        out = method(**given)
        found = expected(given, 0.7, min(1.0, period / 4))
        assert out.loss_labeled.item() == pytest.approx(found["labeled"], rel=1e-12)
        assert out.loss_unlabeled.item() == pytest.approx(found["unlabeled"], rel=1e-12)
        total = 0.5 * out.loss_labeled + out.loss_unlabeled
        assert out.loss.item() == pytest.approx(total.item(), rel=1e-12)
        assert out.mask.tolist() == found["mask"] and out.pseudo_labels.tolist() == found["labels"]
        assert out.class_mass.tolist() == pytest.approx(found["mass"], rel=1e-12)
        thinned.append(found["thinned"])
        out.loss.backward()
        assert given["logits_labeled"].grad[:, 0].abs().sum() > 0
        before = method.pi_u.clone()
        method.end_period()
        expected_pi = 0.9 * before + 0.1 * torch.tensor(found["mass"], dtype=torch.float64) / (
            sum(found["mass"]) + 1
        )
        torch.testing.assert_close(method.pi_u, expected_pi, rtol=1e-9, atol=1e-9)
    assert thinned[0] == 0 and sum(thinned) > 0
    assert method.state_dict()["periods_over"].item() == 6


def test_counts_that_are_no_tail() -> None:
    """The smallest class wherever it is, none without labels; a single class is FixMatch twice."""
    method = ABC(ABCConfig(), setting((5, 0, 20)))
    assert method.kept_share.tolist() == [1.0, 1.0, 0.25]
    given = draws(1)
    assert method(**given).loss.isfinite()
    alone = ABC(ABCConfig(), setting((7,)))
    ones = {k: v[..., :1] if k.startswith("logits") else v for k, v in given.items()}
    ones["targets"] = torch.zeros(6, dtype=torch.int64)
    out = alone(**ones)
    assert out.loss.item() == 0 and out.mask.all()


def test_nothing_confident_and_nothing_labeled() -> None:
    method = ABC(ABCConfig(threshold=1.01), setting(COUNTS))
    given = draws(2)
    given["targets"] = torch.full((6,), -100)
    given["logits_strong"].requires_grad_()
    out = method(**given)
    out.loss.backward()
    assert out.loss.item() == 0 and not out.mask.any() and not given["logits_strong"].grad.any()
    method.end_period()
    assert method.normalised_pi_u().tolist() == pytest.approx([1 / 3] * 3)


def test_confident_names_all_that_the_loss_looks_at() -> None:
    method = ABC(ABCConfig(threshold=0.8), setting(COUNTS))
    given = draws(3, scale=1.0)
    chosen = method.confident(given["logits_weak"])
    assert 0 < chosen.sum() < 9
    loss = method(**given).loss
    given["logits_strong"][~chosen.repeat(2)] = torch.nan
    assert torch.equal(method(**given).loss, loss)
