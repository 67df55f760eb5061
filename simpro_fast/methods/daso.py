"""DASO: pseudo-labels of the classifier, blended with those of class prototypes."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor
from torch.nn.functional import normalize

from simpro_fast.config.methods import DASOConfig
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.class_queue import push_rows
from simpro_fast.methods.needs import Needs, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import IGNORED_TARGET
from simpro_fast.methods.step_rows import StepRows


class DASO(Method):
    """DASO on FixMatch (Oh et al., CVPR 2022).

    For every class the features that the averaged network gives to its last `queue_size` labeled
    weak views are kept; their mean is its prototype c_k. Every `window` steps m becomes the share
    of each class among the final pseudo-labels y of these steps, masked or not. With z the
    student's features, t the threshold, and all targets without gradient, from period `warmup` on:

        q_s = softmax(cos(z(w), c) / proto_temperature)        q_l = softmax(f(w))
        v   = (m^(1 / dist_temperature) / its maximum) of class argmax q_l
        q   = (1 - v) q_l + v q_s,   y = argmax q, kept where max q >= t

        loss = alpha * mean CE(f(x), y_x) + mean over all V*N strong rows of kept * CE(f(s), y)
               + align_weight * mean over them of CE(cos(z(s), c) / proto_temperature, q_s)

    q_s is soft and every image counts in the last line. Before, y and its confidence are those of
    q_l, and the last line is missing. Test: the head as it is.

    The cosine to the prototype of a class that has had no labeled image is 0. m is uniform until
    the first window is over, so v is 1 then.

    Variants: formulas are the same; `paper` has the method's own views, a weak labeled one and one
    strong one, `released` the common ones. The published numbers use dist_temperature 1.5 on
    CIFAR-10 where both distributions are alike and 0.3 elsewhere; which one the SimPro paper took
    for `middle` and `head_tail` is not known, the shipped experiments take 0.3.

    What is not reproduced: there the features of a step are in the prototypes of the same step,
    here from the next one on; there the averaged network normalises them by their batch, here by
    its running statistics; a balanced validation set taken off the training data, weight decay on
    all weights, a constant learning rate and the median of the last 20 test accuracies belong to
    its own protocol, not to the common one.

    State: the queue of 4 K queue_size D bytes, prototypes and m are equal on all ranks, which all
    take the rows of all; the pseudo-labels of the window are counted by each rank. m is the
    estimate of the unlabeled distribution that is logged.
    """

    Config: ClassVar[type[DASOConfig]] = DASOConfig
    rank_counts = (*Method.rank_counts, "labels_seen")
    queue: Tensor
    pushed: Tensor
    prototypes: Tensor
    label_share: Tensor

    @classmethod
    def needs(cls, config: DASOConfig) -> Needs:
        return Needs(features=("weak", "strong"), teacher=("labeled",))

    def __init__(self, config: DASOConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.warmup, self.window = config.warmup, config.window
        self.queue_size, self.align_weight = config.queue_size, config.align_weight
        self.proto_temperature = config.proto_temperature
        self.dist_temperature = config.dist_temperature
        classes, size = setting.num_classes, setting.features
        # The extra row takes writes of rows without a slot, so that shapes stay static.
        self.register_buffer("queue", torch.zeros(classes * self.queue_size + 1, size))
        self.register_buffer("pushed", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("prototypes", torch.zeros(classes, size))
        self.register_buffer("label_share", torch.full_like(self.phi, 1 / classes))
        self.labels_seen = torch.zeros_like(self.phi)
        self.new = StepRows(
            setting.batch_size,
            self.process_group,
            features=torch.zeros(size),
            labels=torch.tensor(IGNORED_TARGET),
        )

    def phase_at(self, period: int) -> int:
        """0: FixMatch; 1: DASO."""
        return int(period >= self.warmup)

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        features_weak: Tensor,
        features_strong: Tensor,
        teacher_labeled: Tensor,
    ) -> MethodOutput:
        """See `Method.forward`; features are [rows, D]."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets, dtype = self.checked_targets(targets), prior_dtype(logits_weak)
        labeled = adjusted_cross_entropy(logits_labeled, targets, None, impl=self.impl)
        predicted = logits_weak.detach().to(dtype).softmax(1)
        align = torch.zeros_like(labeled.detach())
        if self.phase:
            semantic = self._similarity(features_weak.detach(), dtype)
            align = pseudo_label_cross_entropy(
                semantic, self._similarity(features_strong, dtype), None, None, 0.0, impl=self.impl
            ).loss
            share = self.label_share.pow(1 / self.dist_temperature)
            share = (share / share.max()).to(dtype)[predicted.argmax(1)][:, None]
            predicted = (1 - share) * predicted + share * semantic.softmax(1)
        confidence, pseudo_labels = predicted.max(1)
        mask = confidence >= self.bound
        rows = self.masked_cross_entropy(logits_strong, pseudo_labels, mask)
        unlabeled = rows.sum() / max(1, len(rows)) + self.align_weight * align
        if self.training:
            self._remember(teacher_labeled, targets, pseudo_labels)
        return self.counted(labeled, unlabeled, targets, mask, pseudo_labels)

    def _similarity(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines to the prototypes over the temperature, [rows, K]."""
        towards = normalize(self.prototypes, eps=1e-8).to(dtype)
        return normalize(features.to(dtype), eps=1e-8) @ towards.T / self.proto_temperature

    @torch.no_grad()
    def _remember(self, features: Tensor, targets: Tensor, pseudo_labels: Tensor) -> None:
        """Keep the features and labels of this micro-batch's weak labeled views, the first ones."""
        self.new.add(features=features[: len(targets)], labels=targets)
        ones = torch.ones_like(pseudo_labels, dtype=self.labels_seen.dtype)
        self.labels_seen.index_add_(0, pseudo_labels, ones)

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """All ranks' new features into the queue; at the end of a window a new m."""
        self._push(self.from_ranks(self.new["features"]), self.from_ranks(self.new["labels"]))
        self.new.clear()
        if (step + 1) % self.window == 0:
            seen = self.over_ranks(self.labels_seen)
            self.label_share.copy_(torch.where(seen.sum() > 0, seen / seen.sum(), self.label_share))
            self.labels_seen.zero_()

    def _push(self, features: Tensor, labels: Tensor) -> None:
        """Rows in their order: the oldest of a class give way, ignored ones go nowhere."""
        push_rows(self.queue, self.pushed, features, labels)
        held = self.queue[:-1].view(self.num_classes, self.queue_size, -1)
        self.prototypes.copy_(held.sum(1) / self.pushed.clamp(1, self.queue_size)[:, None])

    def normalised_pi_u(self) -> Tensor:
        """m, float64 [K]: the estimate that training follows."""
        return self.label_share.clone()
