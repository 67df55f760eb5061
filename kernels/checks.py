"""Argument checks shared by the operations: one line that says what is wrong and what is right."""

import math

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOGIT_DTYPES = (*KERNEL_DTYPES, torch.float64)
REDUCTIONS = ("mean", "none")


def check_logits(name: str, logits: Tensor) -> None:
    """``logits`` must be a floating [rows, classes] tensor with at least one class."""
    if not isinstance(logits, Tensor):
        raise ValueError(f"{name} must be a tensor [rows, classes], got {type(logits).__name__}")
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(
            f"{name} must have shape [rows, classes] with at least one class, "
            f"got {list(logits.shape)}"
        )
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(
            f"{name} must be float32, bfloat16, float16 or float64, got {short_name(logits.dtype)}"
        )


def check_log_prior(name: str, log_prior: Tensor | None, logits: Tensor) -> None:
    """``log_prior`` must be None or a constant float32/float64 [classes] beside the logits."""
    if log_prior is None:
        return
    num_classes = logits.shape[1]
    if not isinstance(log_prior, Tensor):
        raise ValueError(
            f"{name} must be a tensor [{num_classes}] or None, got {type(log_prior).__name__}"
        )
    if log_prior.dim() != 1 or log_prior.shape[0] != num_classes:
        raise ValueError(f"{name} must have shape [{num_classes}], got {list(log_prior.shape)}")
    # A half-precision prior would round tau * log pi by more than the logits themselves.
    if log_prior.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {short_name(log_prior.dtype)}")
    check_same_device(name, log_prior, "the logits", logits)
    if log_prior.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but this operation treats it as a constant: "
            f"pass {name}.detach()"
        )


def check_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name} ({other.device}), got {tensor.device}"
        )


def check_views(name: str, rows: int, images: int, count: str) -> None:
    """``rows`` must be those of one or more views of every image; ``count`` is their symbol."""
    if (rows > 0) != (images > 0) or rows % max(images, 1):
        raise ValueError(
            f"{name} must have {count} * {images} rows ({count} >= 1 views of {images} images), "
            f"got {rows}"
        )


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")


def check_threshold(threshold: float | Tensor) -> None:
    """A tensor's value is not looked at: the host would wait for the device."""
    if isinstance(threshold, Tensor):
        if threshold.dim() or not threshold.is_floating_point():
            raise ValueError(
                "threshold must be a number or a floating tensor [], got "
                f"{short_name(threshold.dtype)} {list(threshold.shape)}"
            )
    elif math.isnan(threshold):
        raise ValueError(f"threshold must be a number that is not NaN, got {threshold!r}")


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, float32 for everything else."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
