"""The kernel in autograd: a Function for eager calls, an operator for everything that traces.

Both take the same arguments and share their backward. The operator has to return the gradient that
its forward makes; the Function keeps it, which is cheaper. Neither lets autograd materialise zeros
for outputs that have no gradient.

Legend: N images, V strong views, K classes, C columns of the stored gradient's rows.
"""

from typing import Any

import torch
from simpro_kernels.dispatch import is_traced
from simpro_kernels.gradient import hand_over
from simpro_kernels.launch import round_up
from simpro_kernels.pseudo_label_cross_entropy.launch import launch, scales
from simpro_kernels.tl_utils import MAX_ALIGN
from torch import Tensor

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("simpro_kernels::pseudo_label_cross_entropy", mutates_args=())
def pseudo_label_cross_entropy(
    logits_weak: Tensor,
    logits_strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: Tensor,
    hard: bool,
    mean: bool,
    with_grad: bool,
    grad_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss ([] or [V*N]), class_mass, mask, max_prob, stored gradient [V*N, C] ([0, C] if not
    wanted)."""
    tensors = (logits_weak, logits_strong, log_prior_weak, log_prior_strong, threshold)
    loss, class_mass, mask, max_prob, grad = launch(
        *tensors, hard=hard, mean=mean, with_grad=with_grad, grad_columns=grad_columns
    )
    if grad is None:
        grad = logits_strong.new_empty(0, grad_columns)
    return loss, class_mass, mask, max_prob, grad


@pseudo_label_cross_entropy.register_fake
def _(weak: Tensor, strong: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, mean, with_grad, grad_columns = options
    (num_images, num_classes), num_rows = weak.shape, strong.shape[0]
    return (
        weak.new_empty(() if mean else (num_rows,), dtype=torch.float32),
        weak.new_empty((num_classes,), dtype=torch.float32),
        weak.new_empty((num_images,), dtype=torch.bool),
        weak.new_empty((num_images,), dtype=torch.float32),
        strong.new_empty((num_rows if with_grad else 0, grad_columns)),
    )


def _keep(
    ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], grad: Tensor | None
) -> None:
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5])
    ctx.options = (*inputs[5:7], inputs[8])
    # Only here, so that the first backward can take the buffer away and change it in place.
    ctx.grad = grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs, output, output[4] if inputs[7] else None)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, ctx.grad = ctx.grad, None
    saved = ctx.saved_tensors
    if grad_loss is None:
        return (None,) * 9
    hard, mean, columns = ctx.options
    strong = saved[1]
    if grad is None:
        # A second backward of a retained graph: the kernel makes the same gradient again.
        with torch.no_grad():
            grad = pseudo_label_cross_entropy(*saved, hard, mean, True, columns)[4]
    loss_scale, grad_scale = scales(strong, mean)
    factor = grad_loss if grad_scale == loss_scale else grad_loss * (loss_scale / grad_scale)
    grad = hand_over(grad, factor, strong)
    if columns != strong.shape[1]:
        grad = grad[:, : strong.shape[1]]
    return None, grad, *(None,) * 7


pseudo_label_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


class PseudoLabelFunction(torch.autograd.Function):
    """The operator with a gradient, for plain eager calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Outputs:
        *arguments, hard, mean, _, columns = inputs
        result = launch(*arguments, hard=hard, mean=mean, with_grad=True, grad_columns=columns)
        _keep(ctx, inputs, result[:4], result[4])
        return result[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def run(*inputs: Any) -> Outputs:
    """loss, class_mass, mask and max_prob by the cheapest way there is.

    The inputs are those of the operator without the columns of the gradient. It is laid out as the
    strong logits are where they have spare elements after each row; from there the operator is
    told, so that what it returns has the shape of which its traced code was told.
    """
    *arguments, hard, mean, with_grad = inputs
    strong = inputs[1]
    num_classes = strong.shape[1]
    padded = round_up(num_classes, MAX_ALIGN)
    columns = padded if strong.stride() == (padded, 1) else num_classes
    if is_traced(*inputs[:2]):
        return pseudo_label_cross_entropy(*inputs, columns)[:4]
    if with_grad:
        return PseudoLabelFunction.apply(*inputs, columns)
    return launch(*arguments, hard=hard, mean=mean, with_grad=False, grad_columns=columns)[:4]
