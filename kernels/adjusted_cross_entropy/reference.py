"""The computation, in plain PyTorch on any device; the test oracle in float64.

Legend: B images, L labeled views, K classes, R = L*B rows.
"""

import torch
from simpro_kernels.checks import accumulation_dtype
from torch import Tensor
from torch.nn import functional


def adjusted_cross_entropy(
    logits: Tensor,  # [R, K]
    targets: Tensor,  # [B]
    log_prior: Tensor | None,  # [K]
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """The loss, [] or [R]; see ``op.py``."""
    dtype = accumulation_dtype(logits)
    num_rows, num_classes = logits.shape
    target = targets.repeat(num_rows // targets.shape[0] if targets.shape[0] else 1)
    used = target != ignore_index
    in_range = (target >= 0) & (target < num_classes)
    # Ignored rows become constants before any arithmetic: a NaN there is not looked at.
    adjusted = torch.where(used[:, None], logits.to(dtype), 0.0)
    if log_prior is not None:
        adjusted = adjusted + log_prior.to(dtype)
    # torch would raise on the CPU, and abort all work on a device, where an index names no class.
    # A factor of NaN instead poisons the loss and the gradient of its row alone.
    index = torch.where(in_range, target, 0)
    rows = functional.cross_entropy(adjusted, index, reduction="none")
    rows = torch.where(used, rows * torch.where(in_range, 1.0, torch.nan), 0.0)
    return rows if reduction == "none" else rows.sum() / used.sum().clamp(min=1)
