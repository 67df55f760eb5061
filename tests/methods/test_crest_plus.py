"""CReST+ against loops written from its formulas."""

from collections import deque

import pytest
import torch
from torch import Tensor

from simpro_fast.config.methods import CReSTPlusConfig
from simpro_fast.methods import CReSTPlus
from simpro_fast.utils.errors import ConfigError
from tests.equality import assert_bit_equal
from tests.methods.oracles import hard_loss, labeled_loss, softmax
from tests.methods.settings import setting

COUNTS = (15, 5, 40)  # not from head to tail


class Tools:
    """What a phase may ask for: logits only."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = lambda kind: {"unlabeled": logits}[kind]


def draws(seed: int, classes: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int) -> Tensor:
        return torch.randn(rows, classes, generator=g, dtype=torch.float64) * 2

    names = {"logits_labeled": 12, "logits_weak": 9, "logits_strong": 18}
    targets = torch.randint(classes, (6,), generator=g)
    return {"targets": targets, **{name: logits(rows) for name, rows in names.items()}}


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("align", [True, False])
def test_losses_and_window_over_three_generations(variant: str, align: bool) -> None:
    config = CReSTPlusConfig(threshold=0.7, generations=3, align=align, window=4, variant=variant)
    method = CReSTPlus(config, setting(COUNTS, alpha=0.5, periods=6))
    uniform = [[1 / 3] * 3] * 4
    window = deque(uniform if variant == "paper" else [], maxlen=4)
    changed = 0
    for step in range(30):
        period, generation = step // 5, step // 10
        if method.phase_at(period) != method.phase:
            method.phase = method.phase_at(period)
            assert method.enter_phase(method.phase, Tools(torch.zeros(9, 3))).fresh_network
            if variant == "paper":
                window = deque(uniform, maxlen=4)
        assert method.phase == generation
        given = draws(step)
        for name in ("logits_labeled", "logits_weak", "logits_strong"):
            given[name].requires_grad_()
        out = method(**given)
        out.loss.backward()
        assert given["logits_weak"].grad is None

        powers = [(n / 60) ** (1 - generation / 2 * 0.5) for n in COUNTS]
        target = [v / sum(powers) for v in powers]
        past = window or uniform
        mean = [sum(p[k] for p in past) / len(past) for k in range(3)]
        labels, mask, seen = [], [], [0.0] * 3
        for i in range(9):
            p = softmax(given["logits_weak"][i].tolist())
            seen = [s + v / 9 for s, v in zip(seen, p, strict=True)]
            q = [v * (t + 1e-6) / (m + 1e-6) for v, t, m in zip(p, target, mean, strict=True)]
            q = [v / sum(q) for v in q] if align else p
            labels.append(q.index(max(q)))
            mask.append(max(q) >= 0.7)
            changed += labels[-1] != p.index(max(p))
        labeled = labeled_loss(given)
        loss = hard_loss(given["logits_strong"], labels, mask)
        assert out.loss_labeled.item() == pytest.approx(labeled, rel=1e-12)
        assert out.loss_unlabeled.item() == pytest.approx(loss, rel=1e-12)
        assert out.loss.item() == pytest.approx(labeled / 2 + loss, rel=1e-12)
        assert out.mask.tolist() == mask and out.pseudo_labels.tolist() == labels
        method.end_step(step)
        window.append(seen)
        if (step + 1) % 5 == 0:
            method.end_period()
    expected = [sum(p[k] for p in window) / 4 for k in range(3)]
    assert method.recent.mean(0).tolist() == pytest.approx(expected, rel=1e-12)
    assert (changed > 20) == align


def test_rare_classes_join_whatever_their_numbers() -> None:
    """Hand-made: 8 images of each class; labeled 64, 8 and 1 of classes 2, 0 and 1."""
    method = CReSTPlus(CReSTPlusConfig(), setting((8, 1, 64)))
    labels = torch.arange(24) % 3
    confidence = torch.linspace(0.5, 0.9, 24)[torch.randperm(24)]
    logits = torch.zeros(24, 3).scatter_(1, labels[:, None], confidence[:, None].logit() + 3)
    rows, found = method.select(logits)
    # Mirrored counts 8, 64 and 1: cube roots over 64 are a half, one and a quarter.
    assert [found.tolist().count(k) for k in range(3)] == [4, 8, 2]
    assert found.tolist() == labels[rows].tolist() and len(set(rows.tolist())) == 14
    for k in range(3):
        of_class = confidence[labels == k].sort(descending=True).values
        assert confidence[rows[found == k]].tolist() == of_class[: (4, 8, 2)[k]].tolist()


def test_generations_share_the_run() -> None:
    method = CReSTPlus(CReSTPlusConfig(generations=5), setting(periods=12))
    assert [method.phase_at(p) for p in range(13)] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4]
    assert [method.span_at(p) for p in (0, 5, 12)] == [(0, 2), (4, 7), (9, 12)]
    # Three steps of periods of two: the second generation has the last step.
    short = CReSTPlus(CReSTPlusConfig(generations=2), setting(periods=1))
    assert [short.phase_at(p) for p in (0, 1)] == [0, 1]
    with pytest.raises(ConfigError, match=r"method\.generations=5: the run has 2 periods"):
        CReSTPlus(CReSTPlusConfig(generations=5), setting(periods=2))


def test_nothing_confident_no_labels_one_class() -> None:
    method = CReSTPlus(CReSTPlusConfig(threshold=1.01), setting((5, 0, 20)))
    given = draws(1)
    given["targets"] = torch.full((6,), -100)
    out = method(**given)
    method.end_step(0)
    assert out.loss.item() == 0 and not out.mask.any() and method.recent.isfinite().all()
    rows, labels = method.select(given["logits_weak"] * 0)
    assert labels.tolist() == [0] * len(rows)  # the head is class 2; all else mirrors class 0
    alone = CReSTPlus(CReSTPlusConfig(generations=1), setting((7,)))
    one = draws(2, classes=1) | {"targets": torch.zeros(6, dtype=torch.int64)}
    assert alone(**one).loss.item() == 0
    alone.end_step(0)
    assert alone.select(torch.zeros(4, 1))[0].tolist() == [0, 1, 2, 3]


def test_state_goes_on() -> None:
    methods = [CReSTPlus(CReSTPlusConfig(window=3), setting(COUNTS)) for _ in range(2)]
    for step in range(7):
        if step == 4:
            methods[1].load_state_dict(methods[0].state_dict())
        for method in methods if step >= 4 else methods[:1]:
            method(**draws(step))
            method.end_step(step)
        if step >= 4:
            assert_bit_equal(*(dict(m.state_dict()) for m in methods))
