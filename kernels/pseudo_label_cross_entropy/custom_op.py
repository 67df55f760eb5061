"""The kernel as a PyTorch operator: traceable by torch.compile, with autograd.

Legend: N images, V strong views, K classes.
"""

from typing import Any

import torch
from simpro_kernels.gradient import hand_over
from simpro_kernels.pseudo_label_cross_entropy.triton_kernels import launch
from torch import Tensor


def _scales(strong: Tensor, mean: bool) -> tuple[float, float]:
    """Factor of the loss and of the stored gradient.

    1 / (V*N) times a small probability is below the range of float16, so there the gradient is
    stored unscaled and backward applies the factor together with the incoming loss scale.
    """
    loss_scale = 1.0 / max(strong.shape[0], 1) if mean else 1.0
    return loss_scale, 1.0 if strong.dtype == torch.float16 else loss_scale


@torch.library.custom_op("simpro_kernels::pseudo_label_cross_entropy", mutates_args=())
def pseudo_label_cross_entropy(
    logits_weak: Tensor,
    logits_strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: float,
    hard: bool,
    mean: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss ([] or [V*N]), class_mass, mask, max_prob, stored gradient ([0, K] if not wanted)."""
    loss_scale, grad_scale = _scales(logits_strong, mean)
    loss, row_loss, class_mass, mask, max_prob, grad = launch(
        logits_weak,
        logits_strong,
        log_prior_weak,
        log_prior_strong,
        threshold,
        hard=hard,
        with_grad=with_grad,
        loss_scale=loss_scale,
        grad_scale=grad_scale,
    )
    return loss if mean else row_loss, class_mass, mask, max_prob, grad


@pseudo_label_cross_entropy.register_fake
def _(
    logits_weak: Tensor,
    logits_strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: float,
    hard: bool,
    mean: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_images, num_classes = logits_weak.shape
    num_rows = logits_strong.shape[0]
    return (
        logits_weak.new_empty(() if mean else (num_rows,), dtype=torch.float32),
        logits_weak.new_empty((num_classes,), dtype=torch.float32),
        logits_weak.new_empty((num_images,), dtype=torch.bool),
        logits_weak.new_empty((num_images,), dtype=torch.float32),
        logits_strong.new_empty((num_rows if with_grad else 0, num_classes)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:7]
    # A list, so that the first backward can take the buffer away and change it in place.
    ctx.buffer = [output[4]] if inputs[7] else []


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    logits = ctx.saved_tensors
    threshold, hard, mean = ctx.options
    if ctx.buffer:
        grad = ctx.buffer.pop()
    else:
        # A second backward of a retained graph: the kernel makes the same gradient again.
        with torch.no_grad():
            grad = pseudo_label_cross_entropy(*logits, threshold, hard, mean, True)[4]
    strong = logits[1]
    loss_scale, grad_scale = _scales(strong, mean)
    factor = grad_loss if grad_scale == loss_scale else grad_loss * (loss_scale / grad_scale)
    return None, hand_over(grad, factor, strong), None, None, None, None, None, None


pseudo_label_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
