"""The eager twin of the kernel: plain PyTorch, any device, the test oracle in float64.

Legend: B images, L labeled views, K classes, R = L*B rows.
"""

import torch
from simpro_kernels.checks import accumulation_dtype
from simpro_kernels.pseudo_label_cross_entropy.reference import shift_and_log_normaliser
from torch import Tensor


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
    num_views = num_rows // targets.shape[0] if targets.shape[0] else 1
    target = targets.repeat(num_views)
    used = target != ignore_index
    in_range = (target >= 0) & (target < num_classes)

    # Ignored rows become constants before any arithmetic: a NaN there is not looked at.
    adjusted = torch.where(used[:, None], logits.to(dtype), 0.0)
    if log_prior is not None:
        adjusted = adjusted + log_prior.to(dtype)
    shifted, log_normaliser = shift_and_log_normaliser(adjusted)
    index = torch.where(in_range, target, 0)
    rows = log_normaliser - shifted.gather(1, index[:, None]).squeeze(1)
    # An index that names no class poisons its row, which needs no synchronisation. A factor does
    # so for the gradient as well.
    rows = rows * torch.where(in_range | ~used, 1.0, torch.nan)
    rows = torch.where(used, rows, 0.0)
    if reduction == "none":
        return rows
    return rows.sum() / used.sum().clamp(min=1)
