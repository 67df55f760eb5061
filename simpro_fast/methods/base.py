"""What SimPro and FixMatch share: arguments, the two losses, and the counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor

from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import PriorTracker, Recipe

Impl = Literal["auto", "triton", "eager", "compile"]


class PseudoLabelMethod(PriorTracker):
    """A labeled cross entropy plus a masked one towards pseudo-labels of the weak views.

    Subclasses choose the logit adjustments. Arguments as in `SimPro`.
    """

    def __init__(
        self,
        labeled_counts: Sequence[int] | Tensor,
        threshold: float,
        momentum: float,
        alpha: float,
        strong_views: int,
        *,
        recipe: Recipe,
        hard: bool,
        impl: Impl,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(labeled_counts, momentum, recipe=recipe, process_group=process_group)
        if not alpha > 0:
            raise ValueError(f"alpha must be positive, got {alpha}")
        if strong_views < 1:
            raise ValueError(f"strong_views must be at least 1, got {strong_views}")
        self.threshold = threshold
        self.alpha = alpha
        self.strong_views = strong_views
        self.hard = hard
        self.impl: Impl = impl

    def _step(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        log_prior_weak: Tensor | None,
        log_prior_strong: Tensor | None,
    ) -> MethodOutput:
        self._check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        logits_weak = logits_weak.detach()
        labeled = adjusted_cross_entropy(
            logits_labeled, targets, log_prior_strong, reduction="mean", impl=self.impl
        )
        unlabeled = pseudo_label_cross_entropy(
            logits_weak,
            logits_strong,
            log_prior_weak,
            log_prior_strong,
            self.threshold,
            hard=self.hard,
            reduction="mean",
            impl=self.impl,
        )
        if self.training:
            self.accumulate(targets, unlabeled.class_mass)
        # The sum with a float32 prior is float32 for half-precision logits, as in the kernel.
        scores = logits_weak if log_prior_weak is None else logits_weak + log_prior_weak
        return MethodOutput(
            loss=self.alpha * labeled + unlabeled.loss,
            loss_labeled=labeled.detach(),
            loss_unlabeled=unlabeled.loss.detach(),
            mask_rate=unlabeled.mask.sum() / max(1, unlabeled.mask.numel()),
            class_mass=unlabeled.class_mass,
            mask=unlabeled.mask,
            pseudo_labels=scores.argmax(dim=1),
        )

    def _check_shapes(
        self, logits_labeled: Tensor, targets: Tensor, logits_weak: Tensor, logits_strong: Tensor
    ) -> None:
        classes = self.num_classes
        for name, logits in (
            ("logits_labeled", logits_labeled),
            ("logits_weak", logits_weak),
            ("logits_strong", logits_strong),
        ):
            if logits.ndim != 2 or logits.shape[1] != classes:
                raise ValueError(
                    f"{name} must be [rows, {classes}] (K = {classes} from labeled_counts), "
                    f"got {list(logits.shape)}"
                )
        rows, images = len(logits_strong), len(logits_weak)
        if rows != self.strong_views * images:
            raise ValueError(
                f"logits_strong must have strong_views * N = {self.strong_views} * {images} = "
                f"{self.strong_views * images} rows, got {rows}"
            )

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, threshold={self.threshold}, "
            f"momentum={self.momentum}, alpha={self.alpha}, strong_views={self.strong_views}, "
            f"recipe={self.recipe!r}, hard={self.hard}"
        )
