"""From tensors to a launch: outputs, what compiled kernel, its arguments.

Legend: B images, L views, K classes, R = L*B rows, G programs.
"""

import torch
import triton
from simpro_kernels.adjusted_cross_entropy.plans import (
    MAX_ROW,
    Plan,
    Problem,
    count_launcher,
    kept_launcher,
    launcher,
)
from simpro_kernels.adjusted_cross_entropy.triton_kernels import MAX_COUNTED
from simpro_kernels.launch import arrivals
from simpro_kernels.tl_utils import alignment, prior_of, rows_of
from torch import Tensor


def launch(
    logits: Tensor,
    targets: Tensor,
    log_prior: Tensor | None,
    *,
    ignore_index: int,
    mean: bool,
    with_grad: bool,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss ([] or [R]), weight of a row in it [], gradient [R, K] if wanted.

    The gradient is that of the sum of the row losses, times the weight if :func:`scales_grad`.
    """
    logits, targets, prior = rows_of(logits), targets.contiguous(), prior_of(log_prior)
    (num_rows, num_classes), num_images = logits.shape, targets.shape[0]
    problem = Problem(
        num_classes,
        logits.dtype,
        alignment(logits, prior),
        prior is not None,
        with_grad,
        mean,
        scales_grad(logits, mean),
    )
    device = logits.device
    kernel = kept_launcher(problem, device) if plan is None else launcher(problem, device, plan)

    weight = logits.new_empty((), dtype=torch.float32)
    loss = weight.new_empty(() if mean else num_rows)
    grad = logits.new_empty(num_rows, num_classes) if with_grad else None
    tile = kernel.plan.constants.get("ROWS", 1)
    programs = kernel.plan.programs(triton.cdiv(num_rows, tile), device)
    if mean and num_images > MAX_COUNTED:
        count_launcher(device)(1, targets, weight, num_rows, num_images, ignore_index)
    wide = num_classes > MAX_ROW
    kernel(
        programs,
        logits,
        targets,
        weight if prior is None else prior,
        weight,
        loss,
        weight if grad is None else grad,
        weight.new_empty(programs) if mean else weight,
        loss,
        arrivals(device),
        num_rows,
        num_images,
        logits.stride(0),
        ignore_index,
        *((num_classes // kernel.plan.constants["BLOCK"],) if wide else ()),
    )
    return loss, weight, grad


def scales_grad(logits: Tensor, mean: bool) -> bool:
    """Whether the stored gradient has the weight of the mean in it.

    In float16 the weight times a small probability is out of range: backward applies it there,
    together with the incoming loss scale.
    """
    return mean and logits.dtype != torch.float16
