"""CPE against loops written from its formulas."""

import math

import pytest
import torch
from torch import Tensor

from simpro_fast.config.methods import CPEConfig
from simpro_fast.methods import CPE, Heads
from simpro_fast.utils.errors import ConfigError
from tests.methods.settings import setting

# Ranks by count: class 2, then 0, 3, 1.
COUNTS = (15, 2, 40, 5)


def draws(seed: int, scale: float = 5.0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int) -> Tensor:
        return torch.randn(rows, 9, 4, generator=g, dtype=torch.float64) * scale

    names = {"logits_labeled": 12, "logits_weak": 9, "logits_strong": 18}
    targets = torch.randint(4, (6,), generator=g)
    return {"targets": targets, **{name: logits(rows) for name, rows in names.items()}}


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(v - max(row)) for v in row)) + max(row)
    return [v - total for v in row]


def mean_logits(logits: Tensor, row: int, expert: int) -> list[float]:
    """Over branches; the logits of expert e on branch b are number 3 b + e."""
    return [sum(logits[row, 3 * b + expert, k].item() for b in range(3)) / 3 for k in range(4)]


@pytest.mark.parametrize("mean_over", ["images", "terms"])
def test_losses_masks_and_priors_over_several_periods(mean_over: str) -> None:
    config = CPEConfig(threshold=0.7, cuts=(1, 2), mean_over=mean_over)
    method = CPE(config, setting(COUNTS, alpha=0.5))
    medium_or_tail, tail = {0, 3, 1}, {3, 1}
    pi_u, used = [0.25] * 4, set()
    for period in range(3):
        given = draws(period)
        given["logits_weak"].requires_grad_()
        given["logits_strong"].requires_grad_()
        out = method(**given)
        labeled = unlabeled = 0.0
        for expert, tau in enumerate((0, 2, 4)):
            for row in range(12):
                plain = mean_logits(given["logits_labeled"], row, expert)
                adjusted = [v + tau * math.log(n / 62) for v, n in zip(plain, COUNTS, strict=True)]
                labeled -= log_softmax(adjusted)[int(given["targets"][row % 6])] / 12
            total, terms, mask, labels = 0.0, 0, [], []
            for i in range(9):
                log_p = log_softmax(mean_logits(given["logits_weak"], i, expert))
                y = log_p.index(max(log_p))
                mask.append(max(log_p) >= math.log(0.7))
                labels.append(y)
                if not mask[-1]:
                    continue
                used.add(y)
                branches = [True, y in medium_or_tail, y in tail]
                for row in (i, 9 + i):
                    for branch in range(3):
                        if branches[branch]:
                            strong = given["logits_strong"][row, 3 * branch + expert].tolist()
                            total -= log_softmax(strong)[y]
                            terms += 1
            unlabeled += total / (18 if mean_over == "images" else terms + 1e-12)
            if expert == 1:
                assert out.mask.tolist() == mask and out.pseudo_labels.tolist() == labels
                mass = [
                    sum(m and y == k for m, y in zip(mask, labels, strict=True)) for k in range(4)
                ]
        assert out.loss_labeled.item() == pytest.approx(labeled, rel=1e-12)
        assert out.loss_unlabeled.item() == pytest.approx(unlabeled, rel=1e-12)
        assert out.loss.item() == pytest.approx(labeled / 2 + unlabeled, rel=1e-12)
        assert out.class_mass.tolist() == mass
        out.loss.backward()
        assert given["logits_weak"].grad is None
        method.end_period()
        pi_u = [0.9 * p + 0.1 * m / (sum(mass) + 1) for p, m in zip(pi_u, mass, strict=True)]
        assert method.pi_u.tolist() == pytest.approx(pi_u, rel=1e-12)
    assert used == {0, 1, 2, 3}


def test_prediction_is_the_mean_of_the_second_expert() -> None:
    g = torch.Generator().manual_seed(0)
    weight, bias, scale, shift = (
        torch.randn(*shape, generator=g) for shape in ((3, 4, 5), (3, 4), (3, 5), (3, 5))
    )
    z = torch.randn(5, generator=g)
    expected = sum(weight[1] @ (scale[b] * z + shift[b]) + bias[1] for b in range(3)) / 3
    method = CPE(CPEConfig(), setting(COUNTS))
    found, constant = method.test_head(Heads(weight, bias, scale, shift), torch.nn.Identity())
    torch.testing.assert_close(found @ z + constant, expected)


def test_cuts() -> None:
    hundred = CPE(CPEConfig(), setting(tuple(range(200, 100, -1))))
    assert hundred.branches_of.tolist() == [1] * 35 + [2] * 35 + [3] * 30
    nothing_in_tail = CPE(CPEConfig(cuts=(0, 4)), setting(COUNTS))
    assert nothing_in_tail.branches_of.tolist() == [2] * 4
    with pytest.raises(ConfigError, match=r"method.cuts=\[2, 5\]: there are 4 classes"):
        CPE(CPEConfig(cuts=(2, 5)), setting(COUNTS))
    with pytest.raises(ValueError, match="ascending"):
        CPEConfig(cuts=(4, 2))
    with pytest.raises(ValueError, match="between 0 and 100"):
        CPEConfig(taus=(0.0, -1.0, 2.0))


@pytest.mark.parametrize("mean_over", ["images", "terms"])
def test_nothing_confident_no_labels_one_class(mean_over: str) -> None:
    method = CPE(CPEConfig(threshold=1.01, mean_over=mean_over), setting((3, 0, 9, 1)))
    given = draws(1)
    given["logits_strong"].requires_grad_()
    out = method(**given)
    out.loss.backward()
    assert out.loss_labeled.isfinite() and out.loss_unlabeled.item() == 0
    assert not given["logits_strong"].grad.any()
    given["targets"] = torch.full((6,), -100)
    assert method(**given).loss.item() == 0
    alone = CPE(CPEConfig(mean_over=mean_over), setting((7,)))
    one = {k: v[..., :1] if k.startswith("logits") else v for k, v in given.items()}
    assert alone(**one | {"targets": torch.zeros(6, dtype=torch.int64)}).loss.item() == 0


def test_confident_names_all_that_the_loss_looks_at() -> None:
    method = CPE(CPEConfig(threshold=0.8), setting(COUNTS))
    given = draws(3, scale=3.0)
    chosen = method.confident(given["logits_weak"])
    assert 0 < chosen.sum() < 9
    loss = method(**given).loss
    given["logits_strong"][~chosen.repeat(2)] = torch.nan
    assert torch.equal(method(**given).loss, loss)
