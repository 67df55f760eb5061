"""CPG against loops written from its formulas."""

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpro_fast.config.methods import CPGConfig
from simpro_fast.methods import CPG
from simpro_fast.methods.cpg import normals
from tests.equality import assert_bit_equal
from tests.methods.oracles import micro_batches, softmax
from tests.methods.settings import setting

COUNTS = (15, 2, 40)
KEYS: dict[str, Any] = {"warmup": 1, "window": 2, "min_votes": 2, "noise": 0.3, "copies": 3.0}
SETTING: dict[str, Any] = {"num_unlabeled": 7, "mu": 2}


class Head(nn.Linear):
    """Two heads of K classes on four features."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__(4, 2 * classes, dtype=torch.float64)
        weight = torch.arange(8 * classes).view(-1, 4).double().sin()
        with torch.no_grad():
            self.weight.copy_(weight)
            self.bias.copy_(weight.sum(1))

    def logits(self, features: Tensor) -> Tensor:
        return self(features).unflatten(1, (2, -1))


class Tools:
    """What a phase may ask for: features and labels of the labeled images."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features = lambda kind: {"labeled": features}[kind]
        self.labels = lambda: labels


def draws(seed: int, classes: int = 3) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    positions = torch.randint(7, (12,), generator=g)
    # Sure of the same class as often as not, by position and time.
    certain = 4 * nn.functional.one_hot((positions + seed // 30) % classes, classes).double()
    return {
        "targets": torch.randint(classes, (6,), generator=g),
        "logits_labeled": normal(12, 2, classes),
        "logits_weak": normal(12, 2, classes) + certain[:, None],
        "logits_strong": normal(24, 2, classes) + certain.repeat(2, 1)[:, None],
        "features_labeled": normal(12, 4),
        "unlabeled_positions": positions,
        "uniform_labeled": torch.rand(6, 2, generator=g),
        "uniform_unlabeled": torch.rand(12, 2, generator=g),
    }


def smooth_cross_entropy(row: list[float], label: int, smoothing: float) -> float:
    logs = [math.log(p) for p in softmax(row)]
    return -(1 - smoothing) * logs[label] - smoothing * sum(logs) / len(logs)


def add(row: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(row, more, strict=True)]


def slow_normals(uniforms: list[float], size: int) -> list[float]:
    def mixed(word: int) -> int:
        for factor in (0x7FEB352D, 0x45D9F3B):
            word = ((word ^ (word >> 16)) * factor) % 2**32
        return word ^ (word >> 16)

    first, second = (int(u * 2**24) for u in uniforms)
    words = [mixed(mixed(first + 40503 * d) ^ second) for d in range(size)]
    return [NormalDist().inv_cdf(((word >> 8) + 0.5) / 2**24) for word in words]


def slow_spread(features: list[list[float]], labels: list[int], k: int, noise: float) -> float:
    rows = [f for f, label in zip(features, labels, strict=True) if label == k]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    cosines = [
        sum(a * b for a, b in zip(r, mean, strict=True)) / math.hypot(*r) / math.hypot(*mean)
        for r in rows
    ]
    return noise / max(0.1, sum(cosines) / len(cosines))


@pytest.mark.parametrize("parts", [1, 3])
def test_losses_votes_and_acceptance_over_several_windows(parts: int) -> None:
    """Also where the step comes in micro-batches."""
    method = CPG(CPGConfig(threshold=0.8, **KEYS), setting(COUNTS, alpha=0.5, **SETTING))
    head = Head()
    own = torch.tensor([k for k in range(3) for _ in range(COUNTS[k])])
    features = torch.randn(57, 4, generator=torch.Generator().manual_seed(0)) + own[:, None] % 2
    votes = [[0] * 3 for _ in range(7)]
    counts, selected, spread = [float(n) for n in COUNTS], [1 / 3] * 3, [0.3] * 3
    accepted: list[int] = []
    sizes = []
    for step in range(40):
        phase = 0 if step < 5 else 1 + (step // 5 - 1) // 2
        assert method.phase_at(step // 5) == phase
        if method.phase != phase:
            method.phase = phase
            labels = torch.cat([own, torch.tensor(accepted, dtype=torch.int64)])
            change = method.enter_phase(phase, Tools(features, labels))
            spread = [slow_spread(features.tolist(), own.tolist(), k, 0.3) for k in range(3)]
            assert method.spread.tolist() == pytest.approx(spread)
            assert (change is None) == (phase == 1)
            if change is not None:
                found = {
                    n: v.index(max(v))
                    for n, v in enumerate(votes)
                    if sum(v) > 2 and max(v) > 0.8 * sum(v)
                }
                assert change.pseudo_labeled is not None
                positions, joined = (t.tolist() for t in change.pseudo_labeled)
                assert dict(zip(positions, joined, strict=True)) == found
                accepted = joined
                sizes.append(len(joined))
                counts = [n + joined.count(k) for k, n in enumerate(COUNTS)]
                given_to = [joined.count(k) for k in range(3)]
                least = min((n for n in given_to if n), default=1)
                floored = [max(n, least) for n in given_to]
                selected = [n / sum(floored) for n in floored]
                votes = [[0] * 3 for _ in range(7)]
        given = draws(step)
        outs = []
        for small in micro_batches(given, parts):
            for name in ("logits_labeled", "logits_weak", "logits_strong", "features_labeled"):
                small[name].requires_grad_()
            outs.append(method(**small, head=head))
            outs[-1].loss.backward()
            assert small["logits_weak"].grad is None
            assert small["logits_strong"].grad[:, 0].abs().sum() == 0  # head A: labeled rows only
            assert (small["features_labeled"].grad is not None) == bool(phase)

        log_current = [math.log(n / sum(counts)) for n in counts]
        reference = sorted(counts)[1]
        copies = [math.floor(3.0 * reference / n) if phase else 0 for n in counts]
        divisor = sum(n / sum(counts) * (1 + c) for n, c in zip(counts, copies, strict=True))
        labeled = consistent = 0.0
        for row in range(12):
            y = int(given["targets"][row % 6])
            main, auxiliary = (add(r, log_current) for r in given["logits_labeled"][row].tolist())
            labeled += smooth_cross_entropy(auxiliary, y, 0) / 12
            labeled += smooth_cross_entropy(main, y, 0.1) / 12 / divisor
            if phase:
                z = given["features_labeled"][row].tolist()
                noise = slow_normals(given["uniform_labeled"][row % 6].tolist(), 4)
                noisy = [
                    v + spread[y] * e * v / math.hypot(*z) for v, e in zip(z, noise, strict=True)
                ]
                again = head(torch.tensor(noisy, dtype=torch.float64))[:3].tolist()
                ce = smooth_cross_entropy(add(again, log_current), y, 0.1)
                labeled += copies[y] * ce / 12 / divisor
        mask, labels_given = [], []
        for i, position in enumerate(given["unlabeled_positions"].tolist()):
            weak, strong = given["logits_weak"][i].tolist(), given["logits_strong"][i].tolist()
            log_selected = [math.log(v) for v in selected]
            p, q = (softmax(add(r[0], log_selected)) for r in (weak, strong))
            same = p.index(max(p)) == q.index(max(q))
            mask.append(same and max(p) >= 0.72 and max(q) >= 0.72)
            labels_given.append(p.index(max(p)))
            if phase and mask[-1]:
                votes[position][labels_given[-1]] += 1
            target = softmax(weak[1])
            for row in (i, 12 + i):
                other = softmax(given["logits_strong"][row, 1].tolist())
                consistent -= sum(a * math.log(b) for a, b in zip(target, other, strict=True)) / 24
        assert sum(o.loss_labeled.item() for o in outs) / parts == pytest.approx(labeled)
        assert sum(o.loss_unlabeled.item() for o in outs) / parts == pytest.approx(consistent)
        total = sum(o.loss.item() for o in outs) / parts
        assert total == pytest.approx(labeled / 2 + consistent)
        assert torch.cat([o.mask for o in outs]).tolist() == mask
        assert torch.cat([o.pseudo_labels for o in outs]).tolist() == labels_given
        method.end_step(step)
        assert method.votes[:-1].view(7, 3).tolist() == votes
        if step % 5 == 4:
            method.end_period()
    assert len(sizes) == 3 and max(sizes) > 0 and len(set(sizes)) > 1


def test_normals_are_normal_and_of_their_own() -> None:
    uniforms = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    drawn = normals(uniforms, 300)
    assert abs(drawn.mean()) < 0.02 and abs(drawn.var() - 1) < 0.03
    assert abs(drawn.pow(4).mean() - 3) < 0.2
    correlated = torch.corrcoef(drawn.T).fill_diagonal_(0).abs()
    assert correlated.max() < 0.4 and torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.35
    again = normals(uniforms[5:6], 300)
    assert again.tolist() == drawn[5:6].tolist()


def test_nothing_confident_no_labels_one_class() -> None:
    method = CPG(CPGConfig(threshold=1.01, **KEYS), setting((5, 0, 20), **SETTING))
    labels = torch.tensor([0] * 5 + [2] * 20)
    method.enter_phase(1, Tools(torch.ones(25, 4), labels))
    assert method.spread.tolist() == pytest.approx([0.3, 0.3, 0.3])
    method.phase = 1
    given = draws(1) | {"targets": torch.full((6,), -100)}
    given["features_labeled"].requires_grad_()
    out = method(**given, head=Head())
    out.loss.backward()
    assert out.loss_labeled.item() == 0 and out.loss.isfinite() and not out.mask.any()
    assert given["features_labeled"].grad.isfinite().all()
    method.end_step(0)
    assert not method.votes.any()
    change = method.enter_phase(2, Tools(torch.zeros(25, 4), labels))
    assert change is not None and [len(t) for t in change.pseudo_labeled or ()] == [0, 0]
    assert method.selected.tolist() == pytest.approx([1 / 3] * 3)
    assert method.spread.tolist() == pytest.approx([3.0, 0.3, 3.0])  # features without a direction
    assert method(**given, head=Head()).loss.isfinite()
    alone = CPG(CPGConfig(**KEYS), setting((7,), **SETTING))
    alone.phase = 1
    one = draws(2, classes=1) | {"targets": torch.zeros(6, dtype=torch.int64)}
    out = alone(**one, head=Head(1))
    assert out.loss.item() == 0 and out.mask.all()


def test_state_goes_on_within_a_window() -> None:
    methods = [CPG(CPGConfig(threshold=0.6, **KEYS), setting(COUNTS, **SETTING)) for _ in range(2)]
    for method in methods:
        method.phase = 1
    for step in range(7):
        if step == 4:
            methods[1].load_state_dict(methods[0].state_dict())
        for method in methods if step >= 4 else methods[:1]:
            method(**draws(step), head=Head())
            method.end_step(step)
        if step >= 4:
            assert_bit_equal(*(dict(m.state_dict()) for m in methods))
    assert methods[1].votes.sum() > 5
