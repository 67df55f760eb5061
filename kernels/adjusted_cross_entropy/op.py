"""The public operation: argument checks, eager or compiled."""

from collections.abc import Callable

import torch
from simpro_kernels import dispatch
from simpro_kernels.adjusted_cross_entropy import reference
from simpro_kernels.checks import (
    check_log_prior,
    check_logits,
    check_reduction,
    check_same_device,
    check_views,
)
from torch import Tensor, nn


def adjusted_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    log_prior: Tensor | None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """Cross-entropy of ``logits + log_prior`` for labeled views (logit adjustment).

    With B images, L views of each and K classes, row l*B + b belongs to ``targets[b]``::

        loss_{lb} = logsumexp(logits[l*B + b] + log_prior) - (logits[l*B + b] + log_prior)[target_b]

    This is the logit-adjusted loss of Menon et al. (2021) with log_prior = tau * log of the class
    prior; without a prior it is the ordinary cross-entropy.

    Args:
        logits: [L*B, K] float32, bfloat16, float16 or float64, view-major.
        targets: int64 [B].
        log_prior: [K] float32 or float64, constant, or None for none.
        ignore_index: rows with this target give loss 0 and gradient 0.
        reduction: "mean" over the rows that are not ignored (0 if all are), or "none": [L*B].
        impl: "eager", or "compile" (the same through torch.compile, which needs a C++ compiler on
            the CPU). "auto" and "triton" are eager: the labeled rows are few and have no kernel,
            and one ``impl`` may go to both losses.

    Returns:
        The loss, float32 (float64 for float64 logits).

    A target outside [0, K) that is not ``ignore_index`` makes the loss and the gradient of its
    rows NaN: catching it so needs no synchronisation with the device. NaN, +inf or nothing but
    -inf in a row gives NaN; a -inf logit at the target gives +inf.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
    """
    _check_arguments(logits, targets, log_prior, ignore_index)
    check_reduction(reduction)
    dispatch.check_impl(impl)
    loss: Callable[..., Tensor] = reference.adjusted_cross_entropy
    if impl == "compile":
        loss = dispatch.compiled(loss)
    return loss(logits, targets, log_prior, ignore_index, reduction)


class AdjustedCrossEntropy(nn.Module):
    """:func:`adjusted_cross_entropy` with its options fixed."""

    def __init__(
        self, *, ignore_index: int = -100, reduction: str = "mean", impl: str = "auto"
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        dispatch.check_impl(impl)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.impl = impl

    def forward(self, logits: Tensor, targets: Tensor, log_prior: Tensor | None = None) -> Tensor:
        return adjusted_cross_entropy(
            logits,
            targets,
            log_prior,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, impl={self.impl!r}"


def _check_arguments(
    logits: Tensor, targets: Tensor, log_prior: Tensor | None, ignore_index: int
) -> None:
    check_logits("logits", logits)
    if not isinstance(targets, Tensor) or targets.dim() != 1:
        got = list(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"targets must be a tensor of shape [B], got {got}")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {str(targets.dtype).removeprefix('torch.')}")
    check_views("logits", logits.shape[0], targets.shape[0], "L")
    if 0 <= ignore_index < logits.shape[1]:
        raise ValueError(
            f"ignore_index must not name one of the {logits.shape[1]} classes, got {ignore_index}"
        )
    check_same_device("targets", targets, "logits", logits)
    check_log_prior("log_prior", log_prior, logits)
