"""What SimPro and FixMatch share: arguments, the two losses, and the counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from simpro_kernels.pseudo_label_cross_entropy.op import PseudoLabelLoss
from torch import Tensor

from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import IGNORED_TARGET, PriorTracker, Recipe

Impl = Literal["auto", "triton", "eager", "compile"]


class PseudoLabelMethod(PriorTracker):
    """A labeled cross entropy plus a masked one towards pseudo-labels of the weak views.

    Subclasses choose the logit adjustments, which are all they differ in. Arguments as in `SimPro`.
    """

    _bound: Tensor

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
        # A tensor, so that one that changes does not make torch.compile compile again.
        with torch.inference_mode(False):  # or it could not be set anew in training
            self.register_buffer("_bound", torch.tensor(threshold, dtype=torch.float32), False)
        self._threshold = float(threshold)
        self.alpha = alpha
        self.strong_views = strong_views
        self.hard = hard
        self.impl: Impl = impl

    @property
    def threshold(self) -> float:
        """In probability; may be set anew at every step."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        self._threshold = float(value)
        self._bound.fill_(value)

    @property
    def loss_tau(self) -> float:
        """tau of the loss CE(f + tau log phi) that the network is trained with; 0: plain logits."""
        return 0.0

    def adjustments(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the logits of weak views, and of labeled and strong ones: [K] or None.

        Args:
            dtype: float32 or float64, of the result.
        """
        raise NotImplementedError

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
    ) -> MethodOutput:
        """Loss of one step; in training mode the step's class counts are accumulated.

        Args:
            logits_labeled: float [L*B, K], view-major (row l*B + i belongs to targets[i]).
            targets: integer [B], 0..K-1, or -100 for an image that is to be ignored.
            logits_weak: float [N, K]; no gradient flows into it.
            logits_strong: float [V*N, K], view-major.

        Returns:
            MethodOutput; the losses are float32, or float64 for float64 logits.

        Raises:
            ValueError: shapes or types that do not fit; on a CPU also a target out of range (on a
                GPU, where looking would wait for the device, its loss is NaN and it counts for no
                class).
        """
        self._check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets = self._checked_targets(targets)
        logits_weak = logits_weak.detach()
        log_prior_weak, log_prior_strong = self.adjustments(_prior_dtype(logits_weak))
        labeled = adjusted_cross_entropy(
            logits_labeled, targets, log_prior_strong, reduction="mean", impl=self.impl
        )
        unlabeled = self._pseudo_label_loss(
            logits_weak, logits_strong, log_prior_weak, log_prior_strong
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

    @torch.no_grad()
    def confident(self, logits_weak: Tensor) -> Tensor:
        """The images whose strong views `forward` will look at, for callers who skip the others.

        Decided as in `forward`, with a bound that is lower by far more than rounding: another
        order of summation there cannot keep an image that is missing here.

        Args:
            logits_weak: float [N, K].

        Returns:
            bool [N].
        """
        log_prior_weak, _ = self.adjustments(_prior_dtype(logits_weak))
        found = self._pseudo_label_loss(logits_weak, logits_weak, log_prior_weak, None)
        return found.max_prob >= self._bound * (1 - 1e-5)

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
            self._bound,
            hard=self.hard,
            reduction="mean",
            impl=self.impl,
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

    def _checked_targets(self, targets: Tensor) -> Tensor:
        """int64 [B] from any integer type."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise ValueError(f"targets must be integers, got {targets.dtype}")
        targets = targets.long()
        if targets.device.type == "cpu" and not torch.compiler.is_compiling():
            labels = targets.detach().numpy()  # not an operation of torch: nothing to wait for
            wrong = labels[
                (labels != IGNORED_TARGET) & ((labels < 0) | (labels >= self.num_classes))
            ]
            if wrong.size:
                raise ValueError(
                    f"targets must be 0 to {self.num_classes - 1} (K = {self.num_classes} from "
                    f"labeled_counts) or {IGNORED_TARGET} (ignored), got {wrong[0]}"
                )
        return targets

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, threshold={self.threshold}, "
            f"momentum={self.momentum}, alpha={self.alpha}, strong_views={self.strong_views}, "
            f"recipe={self.recipe!r}, hard={self.hard}"
        )


def _prior_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
