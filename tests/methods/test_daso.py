"""DASO against loops and queues written from its formulas."""

import math
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast.config.methods import DASOConfig
from simpro_fast.methods import DASO
from tests.equality import assert_bit_equal
from tests.methods.oracles import micro_batches, softmax
from tests.methods.settings import setting

COUNTS = (40, 15, 5)
KEYS: dict[str, Any] = {"warmup": 1, "window": 3, "queue_size": 4, "dist_temperature": 0.6}


def draws(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(rows: int, size: int, scale: float) -> Tensor:
        return torch.randn(rows, size, generator=g, dtype=torch.float64) * scale

    return {
        "targets": torch.randint(3, (6,), generator=g),
        "logits_labeled": normal(12, 3, 1),
        "logits_weak": normal(9, 3, 3),
        "logits_strong": normal(18, 3, 1),
        "features_weak": normal(9, 4, 1),
        "features_strong": normal(18, 4, 1),
        "teacher_labeled": normal(12, 4, 1),
    }


def cosine(a: list[float], b: list[float]) -> float:
    norms = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0


class Slow:
    """The method in loops: queues, windows, prototypes and losses."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.queues = [deque[list[float]](maxlen=4) for _ in range(3)]
        self.m, self.window = [1 / 3] * 3, list[int]()

    def prototype(self, k: int) -> list[float]:
        rows = self.queues[k]
        return [sum(r[d] for r in rows) / len(rows) if rows else 0.0 for d in range(4)]

    def similar(self, features: list[float]) -> list[float]:
        return [cosine(features, self.prototype(k)) / 0.05 for k in range(3)]

    def step(self, given: dict[str, Tensor], daso: bool) -> dict[str, Any]:
        labeled = hard = align = 0.0
        for row in range(12):
            p = softmax(given["logits_labeled"][row].tolist())
            labeled -= math.log(p[int(given["targets"][row % 6])]) / 12
        mask, labels = [], []
        for i in range(9):
            q = softmax(given["logits_weak"][i].tolist())
            if daso:
                semantic = softmax(self.similar(given["features_weak"][i].tolist()))
                powers = [v ** (1 / 0.6) for v in self.m]
                v = powers[q.index(max(q))] / max(powers)
                q = [(1 - v) * a + v * b for a, b in zip(q, semantic, strict=True)]
                for row in (i, 9 + i):
                    p = softmax(self.similar(given["features_strong"][row].tolist()))
                    align -= sum(a * math.log(b) for a, b in zip(semantic, p, strict=True)) / 18
            labels.append(q.index(max(q)))
            mask.append(max(q) >= self.threshold)
            if mask[-1]:
                for row in (i, 9 + i):
                    hard -= math.log(softmax(given["logits_strong"][row].tolist())[labels[-1]]) / 18
        self.window += labels
        for i in range(6):
            self.queues[int(given["targets"][i])].append(given["teacher_labeled"][i].tolist())
        return {"labeled": labeled, "hard": hard, "align": align, "mask": mask, "labels": labels}

    def end_window(self) -> None:
        self.m = [self.window.count(k) / len(self.window) for k in range(3)]
        self.window.clear()


@pytest.mark.parametrize("parts", [1, 3])
def test_losses_queue_and_window_over_several_periods(parts: int) -> None:
    """Also where the step comes in micro-batches."""
    method = DASO(DASOConfig(threshold=0.8, align_weight=0.5, **KEYS), setting(COUNTS, alpha=0.5))
    slow = Slow(0.8)
    blended = 0
    for step in range(20):
        method.phase = method.phase_at(step // 5)
        assert method.phase == (step >= 5)
        given = draws(step)
        outs = []
        for small in micro_batches(given, parts):
            for name in ("logits_weak", "features_weak", "features_strong", "teacher_labeled"):
                small[name].requires_grad_()
            outs.append(method(**small))
            outs[-1].loss.backward() if outs[-1].loss.requires_grad else None
            assert small["features_weak"].grad is None and small["logits_weak"].grad is None
            assert small["teacher_labeled"].grad is None
            assert (small["features_strong"].grad is not None) == bool(method.phase)
        found = slow.step(given, daso=step >= 5)
        unlabeled = found["hard"] + 0.5 * found["align"]
        close = {"rel": 1e-5, "abs": 1e-6}  # the queue is float32
        assert sum(o.loss_labeled.item() for o in outs) / parts == pytest.approx(found["labeled"])
        mean = sum(o.loss_unlabeled.item() for o in outs) / parts
        assert mean == pytest.approx(unlabeled, **close)
        total = sum(o.loss.item() for o in outs) / parts
        assert total == pytest.approx(found["labeled"] / 2 + unlabeled, **close)
        assert torch.cat([o.mask for o in outs]).tolist() == found["mask"]
        assert torch.cat([o.pseudo_labels for o in outs]).tolist() == found["labels"]
        blended += found["labels"] != given["logits_weak"].argmax(1).tolist()
        method.end_step(step)
        if step % 3 == 2:
            slow.end_window()
            assert method.normalised_pi_u().tolist() == pytest.approx(slow.m)
        prototypes = torch.tensor([slow.prototype(k) for k in range(3)])
        torch.testing.assert_close(method.prototypes, prototypes, rtol=1e-5, atol=1e-6)
        if step % 5 == 4:
            method.end_period()
    assert blended > 5 and len(slow.queues[2]) == 4


def test_more_new_features_than_places_and_ignored_ones() -> None:
    """As if they came one by one: the last ones stay."""
    method = DASO(DASOConfig(**KEYS), setting(COUNTS, batch_size=12))
    slow = [deque[list[float]](maxlen=4) for _ in range(3)]
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        rows = torch.randn(11, 4, generator=g)
        labels = torch.tensor([0, 0, 1, 0, 0, -100, 0, 0, 0, 1, -100])
        method._push(rows, labels)
        for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
            if label >= 0:
                slow[label].append(row)
    held = method.queue[:-1].view(3, 4, 4)
    for k in range(3):
        assert sorted(r for r in held[k].tolist() if any(r)) == sorted(slow[k])
    assert not method.queue[-1].any() and not method.prototypes[2].any()


def test_nothing_confident_no_labels_one_class() -> None:
    method = DASO(DASOConfig(threshold=1.01, **KEYS), setting((3, 0, 9)))
    method.phase = 1
    given = draws(1)
    given["targets"] = torch.full((6,), -100)
    given["features_strong"].requires_grad_()
    out = method(**given)
    out.loss.backward()
    assert not out.mask.any() and given["features_strong"].grad.isfinite().all()
    # Without a prototype all classes are alike: the alignment is the entropy of the uniform.
    assert out.loss.item() == pytest.approx(math.log(3))
    method.end_step(0)
    assert not method.queue.any() and method.pushed.sum() == 0
    alone = DASO(DASOConfig(**KEYS), setting((7,)))
    alone.phase = 1
    one = {k: v[:, :1] if k.startswith("logits") else v for k, v in given.items()}
    out = alone(**one | {"targets": torch.zeros(6, dtype=torch.int64)})
    alone.end_step(2)
    assert out.loss.item() == 0 and out.mask.all() and alone.normalised_pi_u().tolist() == [1.0]


def test_state_goes_on_in_the_middle_of_a_window() -> None:
    methods = [DASO(DASOConfig(**KEYS), setting(COUNTS)) for _ in range(2)]
    for method in methods:
        method.phase = 1
    for step in range(7):
        if step == 4:
            methods[1].load_state_dict(methods[0].state_dict())
        for method in methods if step >= 4 else methods[:1]:
            out = method(**draws(step))
            method.end_step(step)
        if step >= 4:
            assert_bit_equal(*(dict(m.state_dict()) for m in methods))
    assert out.loss.isfinite()
