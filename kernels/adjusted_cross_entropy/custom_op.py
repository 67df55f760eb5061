"""The kernel as a PyTorch operator: traceable by torch.compile, with autograd.

Legend: B images, L views, K classes, R = L*B rows.
"""

from typing import Any

import torch
from simpro_kernels.adjusted_cross_entropy.triton_kernels import launch
from simpro_kernels.gradient import hand_over
from torch import Tensor


def _scale_grad(logits: Tensor, mean: bool) -> bool:
    """Whether the stored gradient has the weight of the mean in it.

    In float16 the weight times a small probability is out of range: backward applies it there,
    together with the incoming loss scale.
    """
    return mean and logits.dtype != torch.float16


@torch.library.custom_op("simpro_kernels::adjusted_cross_entropy", mutates_args=())
def adjusted_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    log_prior: Tensor | None,
    ignore_index: int,
    mean: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss ([] or [R]), weight of a row in the mean [], stored gradient ([0, K] if not wanted)."""
    loss, row_loss, weight, grad = launch(
        logits,
        targets,
        log_prior,
        ignore_index=ignore_index,
        with_grad=with_grad,
        scale_grad=_scale_grad(logits, mean),
    )
    return loss if mean else row_loss, weight, grad


@adjusted_cross_entropy.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    log_prior: Tensor | None,
    ignore_index: int,
    mean: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_classes = logits.shape
    return (
        logits.new_empty(() if mean else (num_rows,), dtype=torch.float32),
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty((num_rows if with_grad else 0, num_classes)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.options = inputs[3:5]
    # A list, so that the first backward can take the buffer away and change it in place.
    ctx.buffer = [output[2]] if inputs[5] else []


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, targets, log_prior, weight = ctx.saved_tensors
    ignore_index, mean = ctx.options
    if ctx.buffer:
        grad = ctx.buffer.pop()
    else:
        # A second backward of a retained graph: the kernel makes the same gradient again.
        with torch.no_grad():
            grad = adjusted_cross_entropy(logits, targets, log_prior, ignore_index, mean, True)[2]
    factor = grad_loss * weight if mean and not _scale_grad(logits, mean) else grad_loss
    return hand_over(grad, factor, logits), None, None, None, None, None


adjusted_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
