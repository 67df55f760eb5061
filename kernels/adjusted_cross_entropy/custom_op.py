"""The kernel in autograd: a Function for eager calls, an operator for everything that traces.

As in ``pseudo_label_cross_entropy``. Legend: B images, L views, K classes, R = L*B rows.
"""

from typing import Any

import torch
from simpro_kernels.adjusted_cross_entropy.launch import launch, scales_grad
from simpro_kernels.dispatch import is_traced
from simpro_kernels.gradient import hand_over
from torch import Tensor


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
    loss, weight, grad = launch(
        logits, targets, log_prior, ignore_index=ignore_index, mean=mean, with_grad=with_grad
    )
    return loss, weight, logits.new_empty(0, logits.shape[1]) if grad is None else grad


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


def _keep(ctx: Any, inputs: tuple[Any, ...], weight: Tensor, grad: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], weight)
    ctx.options = inputs[3:5]
    # Only here, so that the first backward can take the buffer away and change it in place.
    ctx.grad = grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    _keep(ctx, inputs, output[1], output[2] if inputs[5] else None)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, ctx.grad = ctx.grad, None
    logits, targets, log_prior, weight = ctx.saved_tensors
    if grad_loss is None:
        return (None,) * 6
    ignore_index, mean = ctx.options
    if grad is None:
        # A second backward of a retained graph: the kernel makes the same gradient again.
        with torch.no_grad():
            grad = adjusted_cross_entropy(logits, targets, log_prior, ignore_index, mean, True)[2]
    factor = grad_loss * weight if mean and not scales_grad(logits, mean) else grad_loss
    return hand_over(grad, factor, logits), None, None, None, None, None


adjusted_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


class AdjustedFunction(torch.autograd.Function):
    """The operator with a gradient, for plain eager calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ignore_index, mean, _ = inputs
        loss, weight, grad = launch(*tensors, ignore_index=ignore_index, mean=mean, with_grad=True)
        _keep(ctx, inputs, weight, grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def run(*inputs: Any) -> Tensor:
    """The loss by the cheapest way there is; inputs of the operator."""
    *tensors, ignore_index, mean, with_grad = inputs
    if is_traced(tensors[0]):
        return adjusted_cross_entropy(*inputs)[0]
    if with_grad:
        return AdjustedFunction.apply(*inputs)
    return launch(*tensors, ignore_index=ignore_index, mean=mean, with_grad=False)[0]
