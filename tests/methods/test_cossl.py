"""CoSSL against loops and torch's own Adam."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpro_fast.config.methods import CoSSLConfig
from simpro_fast.methods import CoSSL, Heads
from tests.equality import assert_bit_equal
from tests.methods.oracles import hard_loss, labeled_loss, micro_batches, softmax
from tests.methods.settings import setting

COUNTS = (15, 5, 40)
KEYS: dict[str, Any] = {"cotrain_after": 0.1, "queue_size": 4, "head_lr": 0.05, "head_decay": 0.8}


def draws(seed: int, classes: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(rows: int, size: int, scale: float) -> Tensor:
        return torch.randn(rows, size, generator=g, dtype=torch.float64) * scale

    return {
        "targets": torch.randint(classes, (6,), generator=g),
        "logits_labeled": normal(12, classes, 1),
        "logits_weak": normal(12, classes, 3),
        "logits_strong": normal(24, classes, 1),
        "teacher_labeled": normal(12, 4, 2),
        "teacher_weak": normal(12, 4, 2),
        "uniform_labeled": torch.rand(6, 5, generator=g),
        "uniform_unlabeled": torch.rand(12, 5, generator=g),
    }


class Slow:
    """The head in loops: queues in rings, enhancement, Adam, average."""

    def __init__(self) -> None:
        self.rings = [[[0.0] * 4 for _ in range(4)] for _ in range(3)]
        self.pushed = [0, 0, 0]
        self.head = nn.Linear(4, 3).double()
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)
        groups = [
            {"params": [self.head.weight], "weight_decay": 5e-4},
            {"params": [self.head.bias], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.Adam(groups, lr=0.05)
        self.average = [p.detach().clone() for p in self.head.parameters()]
        self.mixed = 0

    def end_step(self, given: dict[str, Tensor]) -> None:
        features = given["teacher_labeled"][6:]
        for row, k in zip(features.tolist(), given["targets"].tolist(), strict=True):
            self.rings[k][self.pushed[k] % 4] = row
            self.pushed[k] += 1
        pool = features.tolist() + given["teacher_weak"].tolist()
        rows, labels = [], []
        present = [k for k in range(3) if self.pushed[k]]
        for u in given["uniform_labeled"].tolist():
            k = present[int(u[0] * len(present))]
            z = self.rings[k][int(u[1] * min(4, self.pushed[k]))]
            if u[2] < (40 - COUNTS[k]) / 40:
                share = 0.6 + 0.4 * u[3]
                other = pool[int(u[4] * len(pool))]
                z = [share * a + (1 - share) * b for a, b in zip(z, other, strict=True)]
                self.mixed += 1
            rows.append(z)
            labels.append(k)
        self.adam.zero_grad()
        z = torch.tensor(rows, dtype=torch.float64)
        nn.functional.cross_entropy(self.head(z), torch.tensor(labels)).backward()
        self.adam.step()
        for mean, parameter in zip(self.average, self.head.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.2)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("variant", ["released", "paper"])
def test_losses_and_head_over_several_periods(parts: int, variant: str) -> None:
    """Also where the step comes in micro-batches; plain before period 2 of 12."""
    config = CoSSLConfig(threshold=0.6, variant=variant, **KEYS)
    method = CoSSL(config, setting(COUNTS, alpha=0.5, mu=2))
    slow, of_head = Slow(), 0
    for step in range(25):
        method.phase = method.phase_at(step // 5)
        given = draws(step)
        outs = []
        for small in micro_batches(given, parts):
            for name in ("logits_labeled", "logits_weak", "logits_strong", "teacher_weak"):
                small[name].requires_grad_()
            outs.append(method(**small))
            outs[-1].loss.backward()
            assert small["logits_weak"].grad is None and small["teacher_weak"].grad is None
        weight, bias = slow.average if variant == "paper" else slow.head.parameters()
        by_head = given["teacher_weak"] @ weight.detach().T + bias.detach()
        mask, labels = [], []
        for i in range(12):
            p = softmax(given["logits_weak"][i].tolist())
            q = softmax(by_head[i].tolist()) if step >= 10 else p
            labels.append(q.index(max(q)))
            mask.append(max(q) >= 0.6)
            of_head += labels[-1] != p.index(max(p))
        labeled = labeled_loss(given)
        loss = hard_loss(given["logits_strong"], labels, mask)
        assert sum(o.loss_labeled.item() for o in outs) / parts == pytest.approx(labeled)
        assert sum(o.loss_unlabeled.item() for o in outs) / parts == pytest.approx(loss, abs=1e-12)
        total = sum(o.loss.item() for o in outs) / parts
        assert total == pytest.approx(labeled / 2 + loss)
        assert torch.cat([o.mask for o in outs]).tolist() == mask
        assert torch.cat([o.pseudo_labels for o in outs]).tolist() == labels
        method.end_step(step)
        slow.end_step(given)
        # The queue is float32, and Adam divides by the size of what is rounded.
        close = {"rtol": 1e-5, "atol": 1e-6}
        for found, (weight, bias) in (
            (method.head, tuple(slow.head.parameters())),
            (method.head_average, tuple(slow.average)),
        ):
            torch.testing.assert_close(found[:, :-1], weight.detach(), **close)
            torch.testing.assert_close(found[:, -1], bias.detach(), **close)
        if step % 5 == 4:
            method.end_period()
    assert of_head > 20 and slow.mixed > 40


def test_averaged_head_predicts_once_it_is_trained_with() -> None:
    method = CoSSL(CoSSLConfig(**KEYS), setting(COUNTS, mu=2))
    method.head_average.copy_(torch.arange(15).view(3, 5))
    own = Heads(torch.ones(1, 3, 4), torch.ones(1, 3), torch.ones(1, 4), torch.zeros(1, 4))
    weight, _ = method.test_head(own, nn.Identity())
    assert weight.unique().tolist() == [1]
    method.phase = 1
    weight, bias = method.test_head(own, nn.Identity())
    assert weight[1].tolist() == [5, 6, 7, 8] and bias.tolist() == [4, 9, 14]
    published = CoSSL(CoSSLConfig(), setting(periods=500))
    assert [published.phase_at(p) for p in (0, 399, 400)] == [0, 0, 1]


def test_nothing_confident_no_labels_one_class() -> None:
    method = CoSSL(CoSSLConfig(threshold=1.01, **KEYS), setting((5, 0, 20), mu=2))
    method.phase = 1
    given = draws(1)
    nothing = given | {"targets": torch.full((6,), -100)}
    out = method(**nothing)
    method.end_step(0)
    assert out.loss.item() == 0 and not out.mask.any() and not method.head.any()
    method(**given | {"targets": torch.tensor([0, 2, 2, 0, 0, 2])})
    method.end_step(1)
    # The class without labels loses what the others gain.
    assert method.head.isfinite().all() and method.head[1, -1] < 0 and method.head.any()
    alone = CoSSL(CoSSLConfig(**KEYS), setting((7,), mu=2))
    alone.phase = 1
    one = draws(2, classes=1) | {"targets": torch.zeros(6, dtype=torch.int64)}
    out = alone(**one)
    alone.end_step(0)
    assert out.loss.item() == 0 and out.mask.all() and not alone.head.any()


def test_state_goes_on() -> None:
    methods = [CoSSL(CoSSLConfig(**KEYS), setting(COUNTS, mu=2)) for _ in range(2)]
    for method in methods:
        method.phase = 1
    for step in range(7):
        if step == 4:
            methods[1].load_state_dict(methods[0].state_dict())
        for method in methods if step >= 4 else methods[:1]:
            method(**draws(step))
            method.end_step(step)
        if step >= 4:
            assert_bit_equal(*(dict(m.state_dict()) for m in methods))
