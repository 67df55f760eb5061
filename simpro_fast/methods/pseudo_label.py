"""Losses and pseudo-labels that SimPro and FixMatch share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from simpro_kernels.pseudo_label_cross_entropy.op import PseudoLabelLoss
from torch import Tensor

from simpro_fast.methods.base import Impl, Method, prior_dtype
from simpro_fast.methods.needs import Needs
from simpro_fast.methods.output import MethodOutput, PseudoLabels
from simpro_fast.methods.priors import Variant


class PseudoLabelMethod(Method):
    """A labeled cross entropy plus a masked one towards pseudo-labels of the weak views.

    Subclasses choose the logit adjustments, which are all they differ in. Arguments as in `SimPro`.
    """

    def __init__(
        self,
        labeled_counts: Sequence[int] | Tensor,
        threshold: float,
        momentum: float,
        alpha: float,
        strong_views: int,
        *,
        variant: Variant,
        hard: bool,
        impl: Impl,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(
            labeled_counts,
            threshold=threshold,
            momentum=momentum,
            alpha=alpha,
            strong_views=strong_views,
            variant=variant,
            impl=impl,
            process_group=process_group,
        )
        self.hard = hard

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(confident=True)

    def adjustments(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return what is added to the logits of weak, and of labeled and strong views: [K] or None.

        Args:
            dtype: float32 or float64, of the result.
        """
        raise NotImplementedError

    def count_all(self, scores: Tensor) -> None:
        """Look at the adjusted weak logits [N, K] of a training step, also of masked images."""

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
    ) -> MethodOutput:
        """See `Method.forward`."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets = self.checked_targets(targets)
        logits_weak = logits_weak.detach()
        log_prior_weak, log_prior_strong = self.adjustments(prior_dtype(logits_weak))
        labeled = adjusted_cross_entropy(
            logits_labeled, targets, log_prior_strong, reduction="mean", impl=self.impl
        )
        unlabeled = self._pseudo_label_loss(
            logits_weak, logits_strong, log_prior_weak, log_prior_strong
        )
        # The sum with a float32 prior is float32 for half-precision logits, as in the kernel.
        scores = logits_weak if log_prior_weak is None else logits_weak + log_prior_weak
        if self.training:
            self.count_all(scores)
        return self.counted(
            labeled,
            unlabeled.loss,
            targets,
            unlabeled.mask,
            scores.argmax(dim=1),
            unlabeled.class_mass,
        )

    @torch.no_grad()
    def confident(self, logits_weak: Tensor) -> Tensor:
        """The images whose strong views `forward` will look at, for callers who skip the others.

        Decided as in `forward`, with a lower bound.

        Args:
            logits_weak: float [N, K].

        Returns:
            bool [N].
        """
        log_prior_weak, _ = self.adjustments(prior_dtype(logits_weak))
        # The weak rows stand in for strong ones: only `max_prob` is read, by the rule of `forward`.
        found = self._pseudo_label_loss(logits_weak, logits_weak, log_prior_weak, None)
        return found.max_prob >= self.lower_bound

    @torch.no_grad()
    def pseudo_labels(self, logits_weak: Tensor) -> PseudoLabels:
        log_prior_weak, _ = self.adjustments(prior_dtype(logits_weak))
        found = self._pseudo_label_loss(logits_weak, logits_weak, log_prior_weak, None)
        scores = logits_weak if log_prior_weak is None else logits_weak + log_prior_weak
        return PseudoLabels(scores.argmax(dim=1), found.max_prob, found.mask)

    def _pseudo_label_loss(
        self,
        logits_weak: Tensor,
        logits_strong: Tensor,
        log_prior_weak: Tensor | None,
        log_prior_strong: Tensor | None,
    ) -> PseudoLabelLoss:
        return pseudo_label_cross_entropy(
            logits_weak,
            logits_strong,
            log_prior_weak,
            log_prior_strong,
            self.bound,
            hard=self.hard,
            reduction="mean",
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hard={self.hard}"
