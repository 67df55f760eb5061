"""CPG against loops written from its formulas, in float64."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpro_fast.config.methods import CPGConfig
from simpro_fast.methods import CPG
from simpro_fast.methods.cpg import normals, selected_shares
from tests.equality import assert_bit_equal
from tests.methods.oracles import micro_batches, softmax
from tests.methods.settings import setting

COUNTS = (9, 2, 20)
KEYS: dict[str, Any] = {"warmup": 1, "window": 2, "vote_share": 0.2}
SETTING: dict[str, Any] = {"num_unlabeled": 30, "mu": 4}


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


def draws(seed: int, joined: Sequence[int] = (), classes: int = 3) -> dict[str, Any]:
    """A step of 2 views of 6 labeled, 24 weak and 2 views of 24 strong; joined: their labels."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    own = [k for k in range(classes) for _ in range(COUNTS[k])]
    places = torch.randint(len(own) + len(joined), (6,), generator=g)
    if classes > 1:
        places[2] = own.index(1)  # or the rare class would not come in every period
    # Sure of the same class more often than not, by position and time; class 1 only early.
    positions = torch.randint(30, (24,), generator=g)
    answers = (positions // 8 % 3).clamp_max(classes - 1)
    answers = torch.where((answers == 1) & (seed >= 25), 0, answers)
    dissent = (torch.rand(24, generator=g) < 0.05) & (classes > 1)
    answers = torch.where(dissent, (answers + 1) % 3, answers)
    certain = (5.0 - 5 * ((positions < 5) & (seed >= 35)))[:, None]
    certain = certain * nn.functional.one_hot(answers, classes).double()
    return {
        "targets": torch.tensor([*own, *joined])[places],
        "logits_labeled": normal(12, 2, classes),
        "logits_weak": normal(24, 2, classes) + certain[:, None],
        "logits_strong": normal(48, 2, classes) + certain.repeat(2, 1)[:, None],
        "features_labeled": normal(12, 4) + 1,
        "labeled_positions": places,
        "unlabeled_positions": positions,
        "uniform_labeled": torch.rand(6, 2, generator=g),
        "uniform_unlabeled": torch.rand(24, 2, generator=g),
    }


def soft_loss(row: list[float], wanted: list[float]) -> float:
    return -sum(w * math.log(p) for w, p in zip(wanted, softmax(row), strict=True) if w)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def slow_normals(uniforms: list[float], size: int) -> list[float]:
    def mixed(word: int) -> int:
        for factor in (0x7FEB352D, 0x45D9F3B):
            word = ((word ^ (word >> 16)) * factor) % 2**32
        return word ^ (word >> 16)

    first, second = (int(u * 2**24) for u in uniforms)
    words = [mixed(mixed(first + 40503 * d) ^ second) for d in range(size)]
    return [NormalDist().inv_cdf(((word >> 8) + 0.5) / 2**24) for word in words]


class Oracle:
    """CPG for one rank, from the formulas: heads 0 (A) and 1 (B), lists and loops."""

    def __init__(self, counts: Sequence[int], draws: float, *, released: bool = True) -> None:
        self.counts, self.classes = list(counts), range(len(counts))
        self.draws, self.released = draws, released
        self.smoothing, self.threshold, self.copies, self.noise = 0.1, 0.95, 10.0, 1.0
        self.vote_share, self.agreement, self.mean_over_images = 0.07, 0.8, False
        self.windows = 0  # 0: warm-up; 1: the first window after it
        self.votes: dict[int, list[int]] = {}
        self.joined: list[tuple[int, list[float]]] = []  # position, shares of votes
        self.selected = [1.0 for _ in counts]
        self.radius = [0.0 for _ in counts]
        self.seen: list[list[tuple[int, list[float]]]] = []  # (label, feature) of each step

    def trained_on(self) -> list[float]:
        """Images per class, labeled and joined."""
        found = [float(c) for c in self.counts]
        for _, shares in self.joined:
            found[shares.index(max(shares))] += 1
        return found

    def smooth(self, label: int) -> list[float]:
        rest = self.smoothing / (len(self.counts) - 1)
        return [1 - self.smoothing if k == label else rest for k in self.classes]

    def adjusted(self, row: list[float], masses: list[float]) -> list[float]:
        total = sum(masses)
        return [row[k] + math.log(masses[k] / total) for k in self.classes]

    def pi_sel(self) -> list[float]:
        """Masses under which images vote."""
        cut = [0.0 if c <= min(self.counts) else c for c in self.selected]
        values = sorted(set(cut))
        if len(values) == 1:
            return [1.0 for _ in cut]
        return [values[1] if c == 0 else c for c in cut]

    def number_of_copies(self, label: int) -> int:
        if self.windows == 0:
            return 0
        if self.windows == 1:
            return int(self.copies)
        masses = self.trained_on()
        return int(self.copies * sorted(masses)[len(masses) // 3] / masses[label])

    def labeled(
        self,
        rows: list[list[list[float]]],
        features: list[list[float]],
        targets: list[int],
        positions: list[int],
        head_a: Callable[[list[float]], list[float]],
        normal: Callable[[int, int], list[float]],
    ) -> float:
        """Both heads' losses. head_a: feature to logits. normal: of image and copy, D numbers."""
        own, masses = sum(self.counts), self.trained_on()
        losses_a, losses_b = [], []
        for i, (row, feature) in enumerate(zip(rows, features, strict=True)):
            image = i % len(targets)
            label, place = targets[image], positions[image]
            soft = self.smooth(label) if place < own else self.joined[place - own][1]
            losses_a.append(soft_loss(self.adjusted(row[0], masses), soft))
            hard = [float(k == label) for k in self.classes]
            wanted = self.smooth(label) if self.windows == 0 else hard
            losses_b.append(soft_loss(self.adjusted(row[1], masses), wanted))
            length = math.sqrt(sum(z * z for z in feature))
            for copy in range(self.number_of_copies(label)):
                scale = self.noise * self.radius[label] / length
                n = normal(i, copy)
                noisy = [z + e * scale * z for z, e in zip(feature, n, strict=True)]
                losses_a.append(soft_loss(self.adjusted(head_a(noisy), masses), soft))
        terms = float(len(losses_a))
        if self.mean_over_images:
            drawn = [m * (1 + self.number_of_copies(k)) for k, m in enumerate(masses)]
            terms = len(rows) * sum(drawn) / sum(masses)
        return sum(losses_a) / terms + sum(losses_b) / len(losses_b)

    def unlabeled(self, weak: list[Any], strong: list[Any]) -> float:
        """B on strong views towards its own hard answer on the weak view, without a mask."""
        losses = []
        for i, row in enumerate(strong):
            answer = weak[i % len(weak)][1]
            label = answer.index(max(answer))
            hard = [float(k == label) for k in self.classes]
            losses.append(soft_loss(row[1], self.smooth(label) if self.windows == 0 else hard))
        return sum(losses) / len(losses)

    def vote(self, weak: list[Any], strong: list[Any], positions: list[int]) -> list[bool]:
        """Which images vote in this step; strong: the first view."""
        voted = []
        for image, position in enumerate(positions):
            seen = [
                softmax(self.adjusted(view[image][0], self.pi_sel())) for view in (weak, strong)
            ]
            labels = [p.index(max(p)) for p in seen]
            sure = min(max(p) for p in seen) >= self.threshold * (1 - self.smoothing)
            voted.append(self.windows > 0 and labels[0] == labels[1] and sure)
            if voted[-1]:
                self.votes.setdefault(position, []).append(labels[0])
        return voted

    def next_window(self) -> None:
        """Accept by the votes of the window that ends, and set the noise of the next."""
        if self.windows > 0:
            self.joined = []
            for position in sorted(self.votes):
                votes = self.votes[position]
                count = [votes.count(k) for k in self.classes]
                often = len(votes) > self.vote_share * self.draws
                if often and max(count) > self.agreement * len(votes):
                    self.joined.append((position, [c / len(votes) for c in count]))
            self.selected = [0.0 for _ in self.counts]
            for _, shares in self.joined:
                self.selected[shares.index(max(shares))] += 1
        self.votes = {}
        self.windows += 1
        self.radius = self.radii()

    def radii(self) -> list[float]:
        """r_k = (1 / m_k) / sum of 1 / m, from the features of the steps in `seen`."""
        rows = [pair for batch in self.seen for pair in batch]
        inverse = []
        for k in self.classes:
            mine = [z for label, z in rows if label == k]
            centre = [sum(column) / len(mine) for column in zip(*mine, strict=True)]
            total = 0.0
            for batch in self.seen:
                near = [(cosine(z, centre) + 1) / 2 for label, z in batch if label == k]
                total += (near[-1] if near else 0.0) if self.released else sum(near)
            inverse.append(len(mine) / total)
        return [value / sum(inverse) for value in inverse]


@pytest.mark.parametrize(
    ("variant", "mean_over", "parts"),
    [("released", "terms", 1), ("paper", "terms", 1), ("released", "images", 3)],
)
def test_losses_votes_and_acceptance_over_several_windows(
    variant: str, mean_over: str, parts: int
) -> None:
    """Also where the step comes in micro-batches."""
    config = CPGConfig(threshold=0.9, variant=variant, mean_over=mean_over, **KEYS)
    method = CPG(config, setting(COUNTS, alpha=0.5, **SETTING))
    head, oracle = Head(), Oracle(COUNTS, 2 * 5 * 24 / 30, released=variant == "released")
    oracle.threshold, oracle.vote_share, oracle.mean_over_images = 0.9, 0.2, mean_over == "images"
    joined: list[int] = []
    refined, split_votes = set(), 0
    for step in range(50):
        if step % 5 == 0 and step % 10 == 5:
            method.phase = method.phase_at(step // 5)
            oracle.next_window()
            change = method.enter_phase(method.phase, None)  # type: ignore[arg-type]
            assert method.phase == oracle.windows and (change is None) == (step == 5)
            if change is not None:
                assert change.pseudo_labeled is not None
                positions, labels = (t.tolist() for t in change.pseudo_labeled)
                assert positions == [p for p, _ in oracle.joined]
                assert labels == [shares.index(max(shares)) for _, shares in oracle.joined]
                joined = labels
                refined.add(tuple(oracle.pi_sel()))
                split_votes += sum(max(shares) < 1 for _, shares in oracle.joined)
            assert method.spread.tolist() == pytest.approx(oracle.radius, rel=1e-12)
        if step % 5 == 0:
            oracle.seen = []
        given = draws(step, joined)
        plain = {name: rows.tolist() for name, rows in given.items()}
        noise = [slow_normals(u, 4) for u in plain["uniform_labeled"]]
        labeled = oracle.labeled(
            plain["logits_labeled"],
            plain["features_labeled"],
            plain["targets"],
            plain["labeled_positions"],
            lambda z: head(torch.tensor(z, dtype=torch.float64))[:3].tolist(),
            lambda row, copy: noise[row % 6],  # noqa: B023
        )
        unlabeled = oracle.unlabeled(plain["logits_weak"], plain["logits_strong"])
        mask = oracle.vote(
            plain["logits_weak"], plain["logits_strong"][:24], plain["unlabeled_positions"]
        )
        oracle.seen.append(list(zip(plain["targets"], plain["features_labeled"][:6], strict=True)))
        outs = []
        for small in micro_batches(given, parts):
            for name in ("logits_labeled", "logits_weak", "logits_strong", "features_labeled"):
                small[name].requires_grad_()
            outs.append(method(**small, head=head))
            outs[-1].loss.backward()
            assert small["logits_weak"].grad is None
            assert small["logits_strong"].grad[:, 0].abs().sum() == 0  # head A: labeled rows only
            assert (small["features_labeled"].grad is not None) == (step >= 5)
        assert sum(o.loss_labeled.item() for o in outs) / parts == pytest.approx(labeled, rel=1e-12)
        found = sum(o.loss_unlabeled.item() for o in outs) / parts
        assert found == pytest.approx(unlabeled, rel=1e-12)
        total = sum(o.loss.item() for o in outs) / parts
        assert total == pytest.approx(labeled / 2 + unlabeled, rel=1e-12)
        if step >= 5:
            assert torch.cat([o.mask for o in outs]).tolist() == mask
        method.end_step(step)
        if step % 5 == 4:
            method.end_period()
    # Windows that differ, a split vote among the accepted, a class without accepted images.
    assert len(refined) > 2 and split_votes > 0


@pytest.mark.parametrize("copies", [0.0, 2.5])
def test_gradient_flows_through_the_direction_of_the_noise(copies: float) -> None:
    method = CPG(CPGConfig(copies=copies, mean_over="terms", **KEYS), setting(COUNTS, **SETTING))
    method.eval()
    method.phase, given, head = 2, draws(3), Head()
    method.spread.copy_(torch.tensor([3.0, 1.0, 2.0]))

    def loss(features: Tensor) -> Tensor:
        out: Tensor = method(**given | {"features_labeled": features}, head=head).loss
        return out

    features = given["features_labeled"].requires_grad_()
    assert torch.autograd.gradcheck(loss, features)
    (grad,) = torch.autograd.grad(loss(features), features)
    assert bool(grad.any()) == bool(copies)


def test_votes_are_counted_against_the_draws_of_an_image() -> None:
    """1.29 draws a window, as in a short run: one vote is enough; of 165 it takes 12 and more."""
    for drawn, enough in ((1.29, 1), (165, 12)):
        keys = {**SETTING, "batch_size": 1, "mu": 1, "period": round(drawn * 500)}
        method = CPG(CPGConfig(window=1), setting(COUNTS, **keys | {"num_unlabeled": 500}))
        method.votes[:-1].view(-1, 3)[range(500), 1] = torch.arange(500, dtype=torch.int32)
        assert method.accepted()[0].tolist() == list(range(enough, 500))


def test_shares_of_accepted_images() -> None:
    """At most as many as the rarest labeled class: the smallest of the other counts."""
    for accepted, expected in (
        ((9.0, 2.0, 5.0), (9, 5, 5)),
        ((2.0, 0.0, 1.0), (1, 1, 1)),
        ((7.0, 7.0, 7.0), (1, 1, 1)),
        ((0.0, 3.0, 0.0), (3, 3, 3)),
    ):
        found = selected_shares(torch.tensor(accepted).double(), torch.tensor(COUNTS).double())
        assert found.tolist() == pytest.approx([n / sum(expected) for n in expected])


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
    method.enter_phase(1, None)  # type: ignore[arg-type]
    method.phase = 1
    assert method.spread.tolist() == pytest.approx([1 / 3] * 3)
    given = draws(1) | {"targets": torch.full((6,), -100), "labeled_positions": torch.arange(6)}
    given["features_labeled"].requires_grad_()
    out = method(**given, head=Head())
    out.loss.backward()
    assert out.loss_labeled.item() == 0 and out.loss.isfinite() and not out.mask.any()
    assert given["features_labeled"].grad.isfinite().all()
    method.end_step(0)
    method(
        **given | {"targets": torch.zeros(6).long(), "features_labeled": torch.zeros(12, 4)},
        head=Head().float(),
    )
    method.end_step(0)
    method.end_period()
    assert not method.votes.any()
    change = method.enter_phase(2, None)  # type: ignore[arg-type]
    assert change is not None and [len(t) for t in change.pseudo_labeled or ()] == [0, 0]
    assert method.selected.tolist() == pytest.approx([1 / 3] * 3)
    assert method.spread.isfinite().all() and method.spread.sum().item() == pytest.approx(1)
    assert method.eval()(**given, head=Head()).loss.isfinite()
    alone = CPG(CPGConfig(**KEYS), setting((9,), **SETTING))
    for alone.phase in (0, 1):
        alone.new.clear()
        out = alone(**draws(2, classes=1), head=Head(1))
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
