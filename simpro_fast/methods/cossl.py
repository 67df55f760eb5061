"""CoSSL: a balanced head, trained beside the network on enhanced features of rare classes."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import CoSSLConfig
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.class_queue import push_rows
from simpro_fast.methods.needs import Heads, Needs, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import IGNORED_TARGET
from simpro_fast.methods.step_rows import StepRows

CLASS, ROW, MIXES, SHARE, OTHER = range(5)
"""Indices of an image's uniform numbers: what each of them draws."""
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class CoSSL(Method):
    """CoSSL on FixMatch (Fan et al., CVPR 2022).

    z are features of the averaged network. Beside the network a linear head h learns by Adam, with
    no gradient to z, from B enhanced features a step (B labeled images): a class k drawn uniformly,
    z_x one of the last `queue_size` features of its labeled images, z_u that of any image of the
    step, labeled or unlabeled, and with N the labeled counts

        z = l z_x + (1 - l) z_u with l uniform in [mix_min, 1), with probability 1 - N_k / N_max,
            else z_x
        loss of h = CE(h(z), k)

    and h_avg is its moving average. From `cotrain_after` of the run's periods on

        loss = alpha * mean CE(f(x), y) + mean over all V*N strong rows of
               [max q >= threshold] CE(f(s), argmax q),   q = softmax(h(z(w)))

    and before with q = softmax(f(w)), which is FixMatch. Test: h_avg on the averaged network, and
    before `cotrain_after` its own head.

    Variants: `released` has q from h, as the published code, `paper` from h_avg, as its comment
    says, and the method's own views, weak labeled ones and two strong ones. The published numbers
    come from two strong views and h.

    What is not reproduced: there labeled images for h come from draws of their own, equally many of
    each class and strongly augmented on CIFAR; here z_x comes from a queue per class of the last
    view of labeled images (the strong one, where they have one), so it may be some steps old, and
    z_u from any place of the batch, not the same one. There h starts at `cotrain_after` on a set of
    features mixed once; here it learns from the first step on, from zeros. Adam at a constant 0.002
    for the network too, and two runs, of which the second begins at a checkpoint of the first,
    belong to its own protocol.

    A class without labels is never drawn, so h gives it what is left. Without any labeled image h
    stays as it is.

    State, equal on all ranks, which collect the features of all and train h alike: the queue of
    4 K queue_size D bytes, h, h_avg and the two moments of Adam, in float64. The rows of a step are
    weighed alike whatever the number of ranks.
    """

    Config: ClassVar[type[CoSSLConfig]] = CoSSLConfig
    queue: Tensor
    pushed: Tensor
    mix_rate: Tensor
    head: Tensor
    head_average: Tensor
    moment1: Tensor
    moment2: Tensor

    @classmethod
    def needs(cls, config: CoSSLConfig) -> Needs:
        return Needs(teacher=("labeled", "weak"), uniforms=5)

    def __init__(self, config: CoSSLConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        classes, size = setting.num_classes, setting.features
        self.plain = config.cotrain_after * setting.periods
        self.queue_size, self.mix_min = config.queue_size, config.mix_min
        self.head_lr, self.head_decay = config.head_lr, config.head_decay
        self.head_weight_decay = config.head_weight_decay
        counts = torch.tensor(setting.labeled_counts, dtype=torch.float64)
        self.register_buffer("mix_rate", 1 - counts / counts.max(), persistent=False)
        # The extra row takes writes of rows without a slot, so that shapes stay static.
        self.register_buffer("queue", torch.zeros(classes * self.queue_size + 1, size))
        self.register_buffer("pushed", torch.zeros(classes, dtype=torch.int64))
        # Weight and, in the last column, bias.
        for name in ("head", "head_average", "moment1", "moment2"):
            self.register_buffer(name, torch.zeros(classes, size + 1, dtype=torch.float64))
        self.labeled_rows = StepRows(
            setting.batch_size,
            self.process_group,
            features=torch.zeros(size),
            labels=torch.tensor(IGNORED_TARGET),
            uniforms=torch.zeros(5),
        )
        self.unlabeled_rows = StepRows(
            setting.mu * setting.batch_size, self.process_group, features=torch.zeros(size)
        )

    def phase_at(self, period: int) -> int:
        """0: FixMatch; 1: pseudo-labels by h."""
        return int(period >= self.plain)

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        teacher_labeled: Tensor,
        teacher_weak: Tensor,
        uniform_labeled: Tensor,
        uniform_unlabeled: Tensor,
    ) -> MethodOutput:
        """See `Method.forward`; features are [rows, D], uniforms [images, 5], those of the
        unlabeled images are not used."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets, weak = self.checked_targets(targets), logits_weak.detach()
        if self.phase:
            used = self.head_average if self.variant == "paper" else self.head
            dtype = prior_dtype(weak)
            features = teacher_weak.detach().to(dtype)
            weak = (features @ used[:, :-1].to(dtype).T + used[:, -1].to(dtype)).to(weak.dtype)
        labeled = adjusted_cross_entropy(logits_labeled, targets, None, impl=self.impl)
        unlabeled = pseudo_label_cross_entropy(
            weak, logits_strong, None, None, self.bound, hard=True, impl=self.impl
        )
        if self.training:
            last_view = teacher_labeled[len(teacher_labeled) - len(targets) :]
            self.labeled_rows.add(features=last_view, labels=targets, uniforms=uniform_labeled)
            self.unlabeled_rows.add(features=teacher_weak)
        return self.counted(
            labeled, unlabeled.loss, targets, unlabeled.mask, weak.argmax(1), unlabeled.class_mass
        )

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """All ranks' features into the queue, and a step of h on enhanced ones."""
        rows = self.labeled_rows
        features, uniforms = self.from_ranks(rows["features"]), self.from_ranks(rows["uniforms"])
        push_rows(self.queue, self.pushed, features, self.from_ranks(rows["labels"]))
        pool = torch.cat([features, self.from_ranks(self.unlabeled_rows["features"])])
        self._train_head(*self._enhanced(uniforms.double(), pool), step + 1)
        rows.clear()
        self.unlabeled_rows.clear()

    def _enhanced(self, uniforms: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Features float64 [B, D] and classes int64 [B], from uniforms [B, 5] and pool [n, D]."""
        there = (self.pushed > 0).long().cumsum(0)
        wanted = (uniforms[:, CLASS] * there[-1]).floor()[:, None]
        label = (there <= wanted).sum(1).clamp_max(self.num_classes - 1)
        held = self.pushed[label].clamp(1, self.queue_size)
        place = label * self.queue_size + (uniforms[:, ROW] * held).floor().long()
        own = self.queue[place].double()
        other = pool[(uniforms[:, OTHER] * len(pool)).floor().long()].double()
        share = self.mix_min + (1 - self.mix_min) * uniforms[:, SHARE]
        mixed = uniforms[:, MIXES] < self.mix_rate[label]
        share = torch.where(mixed, share, 1.0)[:, None]
        return share * own + (1 - share) * other, label

    def _train_head(self, features: Tensor, label: Tensor, count: int) -> None:
        """Step `count` (from 1) of Adam; weight decay on the weight only, as part of the
        gradient."""
        seen = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        error = (seen @ self.head.T).softmax(1)
        error -= (label[:, None] == torch.arange(self.num_classes, device=label.device)).double()
        gradient = error.T @ seen / len(seen)
        gradient[:, :-1] += self.head_weight_decay * self.head[:, :-1]
        self.moment1.lerp_(gradient, 1 - BETA1)
        self.moment2.lerp_(gradient.square(), 1 - BETA2)
        mean, spread = self.moment1 / (1 - BETA1**count), self.moment2 / (1 - BETA2**count)
        moved = self.head - self.head_lr * mean / (spread.sqrt() + EPSILON)
        self.head.copy_(torch.where(self.pushed.any(), moved, self.head))
        self.head_average.lerp_(self.head, 1 - self.head_decay)

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        """h_avg; in the first phase the head of the averaged network."""
        if not self.phase:
            return heads.plain(0)
        return self.head_average[:, :-1], self.head_average[:, -1]
