"""Which implementation runs: ``impl="auto" | "triton" | "eager" | "compile"``."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from simpro_kernels.checks import KERNEL_DTYPES
from torch import Tensor

try:
    import triton
except ImportError:
    HAS_TRITON = False
    INTERPRETED = False
else:
    HAS_TRITON = True

    @triton.jit
    def _probe() -> None:
        pass

    # TRITON_INTERPRET counts at decoration, so a decorated function knows and the environment,
    # which may have changed since, does not.
    INTERPRETED = not isinstance(_probe, triton.JITFunction)

IMPLEMENTATIONS = ("auto", "triton", "eager", "compile")

_logger = logging.getLogger("simpro_kernels")
_logged: set[tuple[str, str]] = set()


def choose(op_name: str, impl: str, logits: Tensor) -> str:
    """Resolve ``impl`` for these logits to "triton", "eager" or "compile".

    "auto" takes the kernel for CUDA tensors of a dtype it supports and the eager twin otherwise,
    never the interpreter. "triton" raises ValueError where the kernel cannot run.
    """
    check_impl(impl)
    if impl == "triton":
        _check_triton_can_run(logits)
        return impl
    if impl == "auto":
        supported = HAS_TRITON and not INTERPRETED and logits.dtype in KERNEL_DTYPES
        impl = "triton" if supported and logits.is_cuda else "eager"
        # Logging has no place in a traced graph; the eager call before or after it reports.
        if not torch.compiler.is_compiling():
            _log_once(op_name, impl, logits)
    return impl


@functools.cache
def compiled(twin: Callable[..., Any]) -> Callable[..., Any]:
    """The eager twin through torch.compile, built at its first call."""
    return torch.compile(twin)


def check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def _check_triton_can_run(logits: Tensor) -> None:
    if not HAS_TRITON:
        raise ValueError(
            "impl='triton' needs the triton package, which is not installed: "
            "pip install triton, or use impl='eager' or 'auto'"
        )
    if logits.dtype not in KERNEL_DTYPES:
        raise ValueError(
            "impl='triton' takes float32, bfloat16 or float16 logits, got "
            f"{str(logits.dtype).removeprefix('torch.')}: use impl='eager' or 'auto'"
        )
    if not logits.is_cuda and not INTERPRETED:
        raise ValueError(
            f"impl='triton' needs tensors on a CUDA device, got {logits.device}: use impl='eager' "
            "or 'auto', or set TRITON_INTERPRET=1 before the first import to run interpreted"
        )


def _log_once(op_name: str, impl: str, logits: Tensor) -> None:
    key = (op_name, impl)
    if key not in _logged:
        _logged.add(key)
        _logger.info("%s: impl=%s on %s", op_name, impl, logits.device.type)
