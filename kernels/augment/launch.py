"""From tensors to a launch: what the device must know, which compiled kernel, its arguments."""

import functools
from collections.abc import Sequence

import torch
from simpro_kernels.augment.operations import operation_constants, shift_and_scale
from simpro_kernels.augment.plans import Problem, kept_launcher
from torch import Tensor


def launch(
    images: Tensor,  # [n, H, W, 3]
    plan: Tensor,  # [v, 14]
    *,
    max_shift: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """The views, [v, H, W, 3]; see ``op.py``."""
    (height, width), device = images.shape[1:3], images.device
    views = torch.empty(len(plan), height, width, 3, dtype=dtype, device=device)
    if not len(plan):
        return views
    kernel = kept_launcher(Problem(height, width, dtype), device)
    plan = plan.contiguous()
    if device.type == "cuda":
        plan = plan.pin_memory().to(device, non_blocking=True)
    kernel(
        len(plan),
        images,
        plan,
        _constants(width, height, device),
        views,
        max_shift,
        *_normalisation(tuple(mean), tuple(std)),
    )
    return views


@functools.cache
def _constants(width: int, height: int, device: torch.device) -> Tensor:
    return torch.tensor(operation_constants(width, height), dtype=torch.int32).to(device)


@functools.lru_cache(maxsize=8)
def _normalisation(mean: tuple[float, ...], std: tuple[float, ...]) -> list[float]:
    shift, scale = shift_and_scale(mean, std)
    return [*shift, *scale]
