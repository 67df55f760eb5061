"""The public operation: argument checks, choice of implementation, result type."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from simpro_kernels import dispatch
from simpro_kernels.checks import (
    check_log_prior,
    check_logits,
    check_reduction,
    check_same_device,
    check_threshold,
    check_views,
)
from simpro_kernels.pseudo_label_cross_entropy import reference
from torch import Tensor, nn

if dispatch.HAS_TRITON:
    from simpro_kernels.pseudo_label_cross_entropy import custom_op


class PseudoLabelLoss(NamedTuple):
    """Result of :func:`pseudo_label_cross_entropy`; only ``loss`` is differentiable."""

    loss: Tensor
    """[] or [V*N] (``reduction="none"``), float32 (float64 for float64 logits)."""
    class_mass: Tensor
    """[K], dtype of the loss: sum of the targets over kept images, each image once."""
    mask: Tensor
    """bool [N]: which images are kept."""
    max_prob: Tensor
    """[N], dtype of the loss: largest adjusted probability of the weak view; NaN if invalid."""


def pseudo_label_cross_entropy(
    logits_weak: Tensor,
    logits_strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: float | Tensor,
    *,
    hard: bool = False,
    reduction: str = "mean",
    impl: str = "auto",
) -> PseudoLabelLoss:
    """Cross-entropy of strong views against confident pseudo-labels of the weak view.

    With N images, V strong views and K classes, for image i and view v::

        q_i       = softmax(logits_weak[i] + log_prior_weak)        (one-hot argmax when ``hard``)
        mask_i    = float32(max q_i) >= float32(threshold)          (of the soft q_i)
        loss_{vi} = mask_i * CE(softmax(logits_strong[v*N + i] + log_prior_strong), q_i)

    SimPro (Du et al., 2024) uses tau * log pi_u and tau * log phi as the two priors; FixMatch
    (Sohn et al., 2020) uses none.

    Args:
        logits_weak: [N, K] float32, bfloat16, float16 or (eager only) float64. No gradient flows
            into it.
        logits_strong: [V*N, K], same dtype and device, view-major: row v*N + i is image i.
        log_prior_weak: [K] float32 or float64, constant, or None for none.
        log_prior_strong: likewise, for the strong views.
        threshold: an image is kept from this probability on; above 1 none is. As a floating
            tensor [] on the logits' device it may change without torch.compile compiling again.
        hard: one-hot targets; the lowest class wins a tie.
        reduction: "mean" over all V*N rows, masked ones included, or "none".
        impl: "triton", "eager", "compile" (the eager twin through torch.compile, which needs a
            C++ compiler on the CPU), or "auto" (the kernel on CUDA, else eager).

    Invalid numbers are never dropped silently. A weak row with NaN, +inf or nothing but -inf (the
    prior added) is masked, but the losses and gradients of its strong rows are NaN. NaN, +inf or
    nothing but -inf in a strong row gives NaN if the image is kept and is not looked at otherwise.
    A -inf logit costs nothing where the target has no mass and gives a loss of +inf where it has.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value, or ``impl="triton"``
            cannot run here.
    """
    _check_arguments(logits_weak, logits_strong, log_prior_weak, log_prior_strong, threshold)
    check_reduction(reduction)
    impl = dispatch.choose("pseudo_label_cross_entropy", impl, logits_strong)
    if impl == "triton":
        with_grad = torch.is_grad_enabled() and logits_strong.requires_grad
        return PseudoLabelLoss(
            *custom_op.run(
                logits_weak.detach() if logits_weak.requires_grad else logits_weak,
                logits_strong,
                log_prior_weak,
                log_prior_strong,
                _kept_bound(threshold, logits_weak.device),
                hard,
                reduction == "mean",
                with_grad,
            )
        )
    twin: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    twin = reference.pseudo_label_cross_entropy
    if impl == "compile":
        twin = dispatch.compiled(twin)
    return PseudoLabelLoss(
        *twin(
            logits_weak,
            logits_strong,
            log_prior_weak,
            log_prior_strong,
            threshold,
            hard,
            reduction,
        )
    )


class PseudoLabelCrossEntropy(nn.Module):
    """:func:`pseudo_label_cross_entropy` with its options fixed."""

    def __init__(
        self,
        threshold: float,
        *,
        hard: bool = False,
        reduction: str = "mean",
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_threshold(threshold)
        check_reduction(reduction)
        dispatch.check_impl(impl)
        self.threshold = threshold
        self.hard = hard
        self.reduction = reduction
        self.impl = impl

    def forward(
        self,
        logits_weak: Tensor,
        logits_strong: Tensor,
        log_prior_weak: Tensor | None = None,
        log_prior_strong: Tensor | None = None,
    ) -> PseudoLabelLoss:
        return pseudo_label_cross_entropy(
            logits_weak,
            logits_strong,
            log_prior_weak,
            log_prior_strong,
            self.threshold,
            hard=self.hard,
            reduction=self.reduction,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        return (
            f"threshold={self.threshold}, hard={self.hard}, "
            f"reduction={self.reduction!r}, impl={self.impl!r}"
        )


def _kept_bound(threshold: float | Tensor, device: torch.device) -> Tensor:
    """float32 []; that of a number is made once, so that a step launches nothing for it."""
    # Traced first: whether a stream is captured is no question that a graph can hold.
    if isinstance(threshold, Tensor) or dispatch.is_traced() or is_captured(device):
        return reference.bound_of(threshold, device)
    return _bound(float(threshold), device)


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(64)
def _bound(threshold: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for calls whose backward saves it
        return reference.bound_of(threshold, device)


def _check_arguments(
    logits_weak: Tensor,
    logits_strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: float | Tensor,
) -> None:
    check_logits("logits_weak", logits_weak)
    check_logits("logits_strong", logits_strong)
    num_images, num_classes = logits_weak.shape
    if logits_strong.shape[1] != num_classes:
        raise ValueError(
            f"logits_strong must have the {num_classes} classes of logits_weak, "
            f"got {logits_strong.shape[1]}"
        )
    check_views("logits_strong", logits_strong.shape[0], num_images, "V")
    if logits_strong.dtype != logits_weak.dtype:
        raise ValueError(
            f"logits_strong must have the dtype of logits_weak ({logits_weak.dtype}), "
            f"got {logits_strong.dtype}"
        )
    check_same_device("logits_strong", logits_strong, "logits_weak", logits_weak)
    check_log_prior("log_prior_weak", log_prior_weak, logits_weak)
    check_log_prior("log_prior_strong", log_prior_strong, logits_strong)
    check_threshold(threshold)
    if isinstance(threshold, Tensor):
        check_same_device("threshold", threshold, "logits_weak", logits_weak)
