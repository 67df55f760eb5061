"""From tensors to a launch: outputs, what compiled kernel, its arguments.

Legend: N images, V strong views, K classes, G programs.
"""

import torch
import triton
from simpro_kernels.launch import arrivals
from simpro_kernels.pseudo_label_cross_entropy.plans import (
    MAX_ROW,
    MAX_TILE,
    Problem,
    kept_launcher,
)
from simpro_kernels.pseudo_label_cross_entropy.triton_tiles import MAX_FINISHED
from simpro_kernels.tl_utils import alignment, prior_of, reduce_partials, rows_of
from torch import Tensor


def launch(
    weak: Tensor,
    strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: Tensor,
    *,
    hard: bool,
    mean: bool,
    with_grad: bool,
    grad_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """loss ([] or [V*N]), class mass [K], mask [N], max_prob [N], gradient [V*N, C] if wanted.

    The gradient is that of the sum of the row losses times the second factor of :func:`scales`, in
    the dtype of the logits, in the first K of C = `grad_columns` columns.
    """
    weak, strong = rows_of(weak), rows_of(strong)
    prior_weak, prior_strong = prior_of(log_prior_weak), prior_of(log_prior_strong)
    (num_images, num_classes), num_rows = weak.shape, strong.shape[0]
    num_views = num_rows // num_images if num_images else 1
    wide = num_classes > MAX_ROW
    grad = strong.new_empty(num_rows, grad_columns) if with_grad else None
    laid_out = (weak, strong) if grad is None else (weak, strong, grad[:, :num_classes])
    problem = Problem(
        num_classes,
        num_views if wide else 0,
        weak.dtype,
        alignment(*laid_out, prior_weak, prior_strong, spare=True),
        prior_weak is not None,
        prior_strong is not None,
        hard,
        with_grad,
        not mean,
    )
    device = weak.device
    kernel = kept_launcher(problem, device)
    if grad is not None and grad_columns > problem.width:  # what the kernel does not write
        grad[:, problem.width :] = 0

    loss_scale, grad_scale = scales(strong, mean)
    max_prob = weak.new_empty(num_images, dtype=torch.float32)
    mask = weak.new_empty(num_images, dtype=torch.bool)
    mass = max_prob.new_empty(num_classes)
    loss = max_prob.new_empty(())
    row_loss = loss if mean else max_prob.new_empty(num_rows)
    tile = kernel.plan.constants.get("ROWS", 1)
    programs = kernel.plan.programs(triton.cdiv(num_images, tile), device)
    partial = max_prob.new_empty(programs * (problem.width + 1))
    finished = num_classes <= MAX_TILE and programs <= MAX_FINISHED
    sums = (mass, loss, arrivals(device)) if num_classes <= MAX_TILE else ()
    kernel(
        programs,
        weak,
        strong,
        max_prob if prior_weak is None else prior_weak,
        max_prob if prior_strong is None else prior_strong,
        row_loss,
        max_prob if grad is None else grad,
        mask,
        max_prob,
        partial,
        *sums,
        num_images,
        num_classes // kernel.plan.constants["BLOCK"] if wide else num_views,
        weak.stride(0),
        strong.stride(0),
        grad_columns,
        threshold,
        loss_scale,
        grad_scale,
    )
    if not finished:
        reduce_partials(partial, programs, problem.width, mass, loss)
    return row_loss, mass, mask, max_prob, grad


def scales(strong: Tensor, mean: bool) -> tuple[float, float]:
    """Factor of the loss and of the stored gradient.

    1 / (V*N) times a small probability is below the range of float16, so there the gradient is
    stored unscaled and backward applies the factor together with the incoming loss scale.
    """
    loss_scale = 1.0 / max(strong.shape[0], 1) if mean else 1.0
    return loss_scale, 1.0 if strong.dtype == torch.float16 else loss_scale
