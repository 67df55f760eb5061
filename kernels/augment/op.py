"""Public function: the augmented views of a step, as the network takes them."""

from collections.abc import Sequence

import torch
from simpro_kernels import dispatch
from simpro_kernels.augment.operations import PLAN_COLUMNS
from simpro_kernels.checks import KERNEL_DTYPES
from torch import Tensor

MAX_PIXELS = 64 * 64
"""Of a view in the kernel. A larger picture does not fit in the registers of one program: 96 x 96
pixels, padded to 16,384, are 32 for each thread of 16 warps, beside their channels, coordinates and
addresses, and a gather would take 64 KiB of shared memory. Larger views are made by the eager twin,
whose launches are few beside the work of such pictures."""


def augment_views(
    images: Tensor,
    plan: Tensor,
    *,
    max_shift: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> Tensor:
    """Gather, mirror, crop, two operations of RandAugment, cutout and normalisation of each view.

    All in integers and in the order and rounding of Pillow, so that the pixels are Pillow's bit for
    bit; then (x - 255 mean) * (1 / (255 std)) in float32, rounded once to ``dtype``. Nothing waits
    for the device.

    Args:
        images: uint8 [n, H, W, 3], contiguous.
        plan: int32 [v, 14] on the CPU, see ``operations.py``; a pinned one is sent without a copy
            on the host. Its values are not checked: an image or a shift out of range reads
            elsewhere.
        max_shift: largest crop offset, pixels, below both sides: pictures are padded by so much,
            by reflection.
        mean, std: per channel, on the 0..1 scale.
        dtype: of the views: float32, bfloat16 or float16.
        impl: "auto" takes the kernel on a CUDA device for pictures of up to 64 x 64 pixels and the
            eager twin otherwise; "triton" or "eager" force one.

    Returns:
        [v, H, W, 3], contiguous: ``.permute(0, 3, 1, 2)`` is channels_last.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or the kernel asked for where it cannot run.
    """
    _check_arguments(images, plan, max_shift, dtype)
    options = {"max_shift": max_shift, "mean": mean, "std": std, "dtype": dtype}
    if _choose(impl, images) == "eager":
        from simpro_kernels.augment import reference  # needs numpy

        return reference.augment_views(images, plan, **options)
    from simpro_kernels.augment import launch  # needs triton

    return launch.launch(images, plan, **options)


def _choose(impl: str, images: Tensor) -> str:
    if impl == "compile":
        raise ValueError("augment_views plans on the host and has no impl='compile': use 'auto'")
    fits = images.shape[1] * images.shape[2] <= MAX_PIXELS
    if impl == "triton" and not fits:
        raise ValueError(
            f"impl='triton' takes pictures of at most {MAX_PIXELS} pixels, got "
            f"{images.shape[1]} x {images.shape[2]}: use impl='eager' or 'auto'"
        )
    if impl == "auto" and not fits:
        return "eager"
    return dispatch.choose("augment_views", impl, images, (torch.uint8,))


def _check_arguments(images: Tensor, plan: Tensor, max_shift: int, dtype: torch.dtype) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[3] != 3:
        raise ValueError(f"images must be uint8 [n, H, W, 3], got {_described(images)}")
    if not images.is_contiguous():
        raise ValueError("images must be contiguous")
    if plan.dtype != torch.int32 or plan.dim() != 2 or plan.shape[1] != PLAN_COLUMNS:
        raise ValueError(f"plan must be int32 [v, {PLAN_COLUMNS}], got {_described(plan)}")
    if plan.device.type != "cpu":
        raise ValueError(f"plan must be on the CPU, got {plan.device}")
    if not 0 <= max_shift < min(images.shape[1:3]):
        raise ValueError(
            f"max_shift must be 0..{min(images.shape[1:3]) - 1} for pictures of "
            f"{images.shape[1]} x {images.shape[2]}, got {max_shift}"
        )
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
