# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""From the gradient that a forward kernel made to the one that autograd asks for.

A forward kernel writes the gradient of its loss into a buffer of its own. The first backward
scales that buffer in place by the incoming gradient and hands it over: no second buffer, and where
the incoming gradient is 1 (a loss that is summed and called backward on) the kernel returns without
touching memory. The factor is read on the device, so nothing synchronises. Traced code and
``create_graph=True`` get the scaled gradient from an operator without side effects.
"""

import functools

import torch
import triton
import triton.language as tl
from simpro_kernels.launch import Launcher, Plan
from torch import Tensor

_BLOCK = 2048
_PLAN = Plan(warps=4, resident=8, constants={"BLOCK": _BLOCK})


@triton.jit
def scale_block(
    grad_ptr, out_ptr, factor_ptr, factor, factor_stride, start, numel,
    COLUMNS: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
    inside = offsets < numel
    if COLUMNS:
        factor = tl.load(factor_ptr + offsets // COLUMNS * factor_stride, mask=inside, other=1.0)
        moves = tl.max((factor != 1.0).to(tl.int32), 0) != 0 if IN_PLACE else True
    else:
        moves = True
    if moves:
        # Both buffers are our own and contiguous: wide accesses whatever K is.
        grad_ptrs = tl.multiple_of(grad_ptr + offsets, 16)
        out_ptrs = tl.multiple_of(out_ptr + offsets, 16)
        grad = tl.load(grad_ptrs, mask=inside) if TAIL else tl.load(grad_ptrs)
        grad = (grad.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
        if TAIL:
            tl.store(out_ptrs, grad, mask=inside)
        else:
            tl.store(out_ptrs, grad)


@triton.jit(do_not_specialize=["grad_ptr", "out_ptr", "factor_ptr", "numel", "factor_stride"])
def scale_rows_kernel(
    grad_ptr,  # [R, K] contiguous
    out_ptr,  # [R, K] contiguous; the same memory with IN_PLACE
    factor_ptr,  # [R] or []
    numel: tl.int64,
    factor_stride: tl.int64,
    COLUMNS: tl.constexpr,  # K with a factor for each row, else 0
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply by the factor; in place, a factor of 1 costs no memory traffic."""
    factor = tl.load(factor_ptr)
    if COLUMNS == 0 and IN_PLACE:  # a constexpr `and` a tensor is a tensor
        if factor == 1.0:
            return
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        if start + BLOCK <= numel:
            scale_block(
                grad_ptr, out_ptr, factor_ptr, factor, factor_stride, start, numel,
                COLUMNS, IN_PLACE, BLOCK, False,
            )  # fmt: skip
        else:
            scale_block(
                grad_ptr, out_ptr, factor_ptr, factor, factor_stride, start, numel,
                COLUMNS, IN_PLACE, BLOCK, True,
            )  # fmt: skip


@functools.cache
def launcher(dtype: torch.dtype, columns: int, in_place: bool, device: torch.device) -> Launcher:
    """The kernel for one factor (``columns`` 0) or one for each row of so many columns.

    ``dtype`` is that of the gradient: another one compiles another kernel.
    """
    constants = {"COLUMNS": columns, "IN_PLACE": in_place}
    return Launcher(scale_rows_kernel, constants, _PLAN, device)


def _launch(grad: Tensor, out: Tensor, factor: Tensor) -> None:
    numel = grad.numel()
    if numel == 0:
        return
    columns, stride = (grad.shape[1], factor.stride(0)) if factor.dim() else (0, 0)
    launch = launcher(grad.dtype, columns, out is grad, grad.device)
    programs = launch.plan.programs(triton.cdiv(numel, _BLOCK), grad.device)
    launch(programs, grad, out, factor, numel, stride)


@torch.library.custom_op("simpro_kernels::scale_rows", mutates_args=())
def scale_rows(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    """grad [R, K] contiguous times factor, float32 [] or [R]: in float32, rounded once.

    ``logits`` are the differentiated input, not read. They carry the graph of a second derivative
    to the error below; without them the result would be a constant, and silently wrong.
    """
    out = torch.empty_like(grad)
    _launch(grad, out, factor)
    return out


@scale_rows.register_fake
def _(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _refuse(ctx: object, grad: Tensor) -> None:
    raise RuntimeError(
        "the fused loss of simpro_kernels is differentiable once: use impl='eager' for a second "
        "derivative"
    )


scale_rows.register_autograd(_refuse)


def hand_over(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    """The gradient for autograd, from a buffer ``grad`` that nobody else uses."""
    # Tracers see subclasses of Tensor, and a graph may not change the output of another one.
    traced = type(grad) is not Tensor
    if traced or torch.is_grad_enabled():
        return scale_rows(grad, factor, logits)
    _launch(grad, grad, factor)
    return grad
