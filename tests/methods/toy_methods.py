"""Methods that ask for everything there is, and one that changes its mind."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from simpro_fast.config.methods import MethodConfig
from simpro_fast.methods import (
    Change,
    Heads,
    Method,
    MethodOutput,
    Needs,
    PhaseTools,
    Setting,
    common,
)


class GreedyConfig(MethodConfig):
    branches: int = Field(2, ge=0, le=4)
    phases: bool = False


class Greedy(Method):
    """Asks for everything; every input moves the loss or the state, so that any error shows."""

    Config: ClassVar[type[MethodConfig]] = GreedyConfig
    rank_counts = (*Method.rank_counts, "seen")
    table: Tensor
    drawn: Tensor

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(
            heads=2,
            branches=config.branches,
            features=("labeled", "weak", "strong"),
            teacher=("labeled", "weak"),
            constant_images=(1.0, -0.5),
            positions=("labeled", "unlabeled"),
            uniforms=3,
            head=True,
        )

    def __init__(self, config: Any, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.config, self.setting = config, setting
        self.register_buffer("table", torch.zeros(setting.num_unlabeled, dtype=torch.float64))
        self.register_buffer("drawn", torch.zeros(3, dtype=torch.float64))
        self.seen = torch.zeros(3, dtype=torch.float64)
        self._step: list[tuple[Tensor, Tensor]] = []
        self.scale = nn.Parameter(torch.ones(1))
        self.projection = nn.Linear(setting.features, 3)
        self.late = nn.Parameter(torch.ones(2))  # without gradient in the first phase
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, logits_labeled: Tensor, targets: Tensor, **given: Any) -> MethodOutput:
        weak, strong = given["logits_weak"].detach(), given["logits_strong"]
        count, classes = 2 * max(1, self.config.branches), self.setting.num_classes
        views, images = len(logits_labeled) // len(targets), len(weak)
        assert logits_labeled.shape[1:] == weak.shape[1:] == (count, classes)
        assert given["logits_constant"].shape == (2, count, classes)
        shape = (self.config.branches,) if self.config.branches else ()
        for kind, rows in (("labeled", views * len(targets)), ("weak", images)):
            for source in ("features", "teacher"):
                found = given[f"{source}_{kind}"]
                assert found.shape == (rows, *shape, self.setting.features)
                assert found.requires_grad == (source == "features" and torch.is_grad_enabled())
        assert given["uniform_labeled"].shape == (len(targets), 3)
        assert given["uniform_unlabeled"].shape == (images, 3)
        # The head on its own features gives its logits.
        again = given["head"].logits(given["features_labeled"]).flatten(1)
        torch.testing.assert_close(again, logits_labeled.flatten(1), rtol=1e-4, atol=1e-5)
        rows = targets.repeat(views)
        scaled = logits_labeled * self.scale
        losses = [cross_entropy(scaled[:, h], rows) for h in range(count)]
        weights = given["uniform_unlabeled"][:, :1].repeat(self.setting.strong_views, 1)
        noise = strong.flatten(1) * weights
        agree = (given["features_weak"] - given["teacher_weak"]).square().mean()
        loss = torch.stack(losses).mean() + 1e-3 * (noise.square().mean() + agree)
        loss = loss + 1e-4 * given["logits_constant"].square().mean()
        loss = loss + 1e-2 * (self.projection(given["features_weak"]) - 1).square().mean()
        if self.phase or not self.config.phases:
            loss = loss + 1e-2 * self.late.square().sum()
        top = weak[:, 0].softmax(1).max(1).values
        self._step.append((given["unlabeled_positions"], top.double()))
        self.seen += given["uniform_labeled"].double().sum(0) + given["labeled_positions"].sum()
        mass = weak[:, 0].softmax(1).sum(0)
        self.accumulate(targets, mass)
        return MethodOutput(
            loss=loss,
            loss_labeled=loss.detach(),
            loss_unlabeled=noise.detach().mean(),
            mask_rate=torch.ones_like(loss.detach()),
            class_mass=mass,
            mask=torch.ones(images, dtype=torch.bool),
            pseudo_labels=weak[:, 0].argmax(1),
        )

    def end_step(self, step: int) -> None:
        positions, values = (torch.cat(parts) for parts in zip(*self._step, strict=True))
        self._step.clear()
        self.table[self.from_ranks(positions)] = self.from_ranks(values)
        self.drawn += self.over_ranks(self.seen)
        self.seen.zero_()

    def phase_at(self, period: int) -> int:
        return min(2, period) if self.config.phases else 0

    def span_at(self, period: int) -> tuple[int, int] | None:
        if not self.config.phases:
            return None
        return [(0, 1), (1, 2), (2, self.setting.periods)][min(2, period)]

    def enter_phase(self, phase: int, tools: PhaseTools) -> Change:
        logits, labels = tools.logits("unlabeled"), tools.labels()
        own = sum(self.setting.labeled_counts)
        assert logits.shape == (self.setting.num_unlabeled, self.setting.num_classes)
        assert tools.features("labeled").shape == (own, self.setting.features)
        # In the second phase those of the first are among them, and do not stay in the third.
        assert len(labels) == own + (0 if phase == 1 else 3)
        best = logits.softmax(1).max(1).values.argsort(descending=True)[: 2 + phase]
        return Change(fresh_network=True, pseudo_labeled=(best, logits[best].argmax(1)))

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        assert not network.training
        return heads.plain(1)
