"""Which implementation runs: ``impl="auto" | "triton" | "eager" | "compile"``."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from simpro_kernels.checks import KERNEL_DTYPES, short_name
from torch import Tensor

try:
    import triton
except Exception as error:  # also one that is installed and broken
    HAS_TRITON = False
    INTERPRETED = False
    _WHY_NOT = f"{type(error).__name__}: {error}"
else:
    HAS_TRITON = True

    @triton.jit
    def _probe() -> None:
        pass

    # TRITON_INTERPRET counts at decoration, so a decorated function knows and the environment,
    # which may have changed since, does not.
    INTERPRETED = not isinstance(_probe, triton.JITFunction)
    if INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        # Its interpreter makes loop bounds of one-element arrays by int(), which numpy 2.5 refuses.
        from triton.runtime import interpreter

        _patch_lang_tensor = interpreter._patch_lang_tensor

        def _patch_with_index(tensor: Any, scope: Any) -> None:
            _patch_lang_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _patch_with_index

IMPLEMENTATIONS = ("auto", "triton", "eager", "compile")

_logger = logging.getLogger("simpro_kernels")
_logged: set[tuple[str, str]] = set()


def choose(
    op_name: str, impl: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES
) -> str:
    """Resolve ``impl`` for this input to "triton", "eager" or "compile".

    "auto" takes the kernel for CUDA tensors of a dtype it supports and the eager twin otherwise,
    never the interpreter. "triton" raises ValueError where the kernel cannot run.
    """
    check_impl(impl)
    if impl == "triton":
        _check_triton_can_run(tensor, dtypes)
        return impl
    if impl == "auto":
        supported = HAS_TRITON and not INTERPRETED and tensor.dtype in dtypes
        impl = "triton" if supported and tensor.is_cuda else "eager"
        # Logging has no place in a traced graph; the eager call before or after it reports.
        if not torch.compiler.is_compiling():
            _log_once(op_name, impl, tensor)
    return impl


def is_traced(*tensors: Tensor) -> bool:
    """Whether operators are being recorded: torch.compile, a dispatch mode, a subclass, functorch.

    They need the registered operator. Plain eager calls take a torch.autograd.Function, which
    costs about 45 us less in forward and 150 us less in forward and backward.
    """
    return (
        torch.compiler.is_compiling()
        or any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def compiled(twin: Callable[..., Any]) -> Callable[..., Any]:
    """The eager twin through torch.compile; itself where the caller is being compiled."""
    return twin if torch.compiler.is_compiling() else _compiled(twin)


@functools.cache
def _compiled(twin: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(twin)


def check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def _check_triton_can_run(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not HAS_TRITON:
        raise ValueError(
            f"impl='triton' needs the triton package, which cannot be imported ({_WHY_NOT}): "
            "pip install triton, or use impl='eager' or 'auto'"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"impl='triton' takes {', '.join(map(short_name, dtypes))}, got "
            f"{short_name(tensor.dtype)}: use impl='eager' or 'auto'"
        )
    if not tensor.is_cuda and not INTERPRETED:
        raise ValueError(
            f"impl='triton' needs tensors on a CUDA device, got {tensor.device}: use impl='eager' "
            "or 'auto', or set TRITON_INTERPRET=1 before the first import to run interpreted"
        )


def _log_once(op_name: str, impl: str, tensor: Tensor) -> None:
    key = (op_name, impl)
    if key not in _logged:
        _logged.add(key)
        _logger.info("%s: impl=%s on %s", op_name, impl, tensor.device.type)
