"""The operation in autograd: a Function for eager calls, an operator for everything that traces.

Legend: matrices [M, C] with M = N*H*W rows of C channels.
"""

from typing import Any

import torch
import torch.distributed as dist
from simpro_kernels import dispatch
from simpro_kernels.batch_norm_act import reference
from torch import Tensor

if dispatch.HAS_TRITON:
    from simpro_kernels.batch_norm_act import launch


class BatchNormActFunction(torch.autograd.Function):
    """Forward and backward of a backend, `reference` or `launch`, over one process or all ranks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """x, residual, weight, bias, running mean and variance, momentum, eps, slope, backend,
        process group (None: this process alone)."""
        x, residual, weight, bias, _, _, _, eps, negative_slope, backend, group = inputs

        def gather(row: Tensor) -> Tensor:
            rows = row.new_empty(dist.get_world_size(group), len(row))
            dist.all_gather(list(rows.unbind()), row, group=group)
            return rows

        matrix, added = to_matrix(x), None if residual is None else to_matrix(residual)
        y, saved = backend.forward(matrix, added, *inputs[2:9], None if group is None else gather)
        # The sign of y tells the branch of the activation. The kernels find it in x where nothing
        # is added, so that y need not stay; the twin reads y.
        keeps_y = negative_slope != 1 and (backend is reference or residual is not None)
        images = to_images(y, x)
        ctx.save_for_backward(x, images if keeps_y else None, saved, weight, bias)
        ctx.options = (eps, negative_slope, residual is not None)
        ctx.backend, ctx.group = backend, group
        return images

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def all_reduce(total: Tensor) -> None:
            dist.all_reduce(total, group=ctx.group)

        x, y, saved, weight, bias = ctx.saved_tensors
        grad_x, grad_residual, grad_weight, grad_bias = ctx.backend.backward(
            to_matrix(grad),
            to_matrix(x),
            None if y is None else to_matrix(y),
            saved,
            weight,
            bias,
            *ctx.options,
            None if ctx.group is None else all_reduce,
        )
        of_residual = to_images(grad_residual, x) if ctx.options[2] else None
        return (to_images(grad_x, x), of_residual, grad_weight, grad_bias, *[None] * 7)


def to_matrix(x: Tensor) -> Tensor:
    """[N, C, ...] as [N * ..., C] contiguous, a view where x is channels_last."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).contiguous()


def to_images(matrix: Tensor, x: Tensor) -> Tensor:
    """A matrix in the shape of x."""
    return matrix.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


@torch.library.custom_op("simpro_kernels::batch_norm_act", mutates_args=())
def batch_norm_act(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    """y [M, C] and the statistics [2 C + 1], which the running ones do not follow here."""
    return launch.forward(x, residual, weight, bias, None, None, 0.0, eps, negative_slope, None)


@batch_norm_act.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2 * x.shape[1] + 1, dtype=torch.float32)


@torch.library.custom_op("simpro_kernels::batch_norm_act_backward", mutates_args=())
def batch_norm_act_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor | None,
    saved: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual (empty without an own one), weight and bias."""
    grad_x, grad_residual, grad_weight, grad_bias = launch.backward(
        grad.contiguous(), x, y, saved, weight, bias, eps, negative_slope, has_residual, None
    )
    # An operator may not return its input, nor two views of one tensor.
    grad_residual = (
        grad.new_empty(0) if grad_residual.data_ptr() == grad.data_ptr() else grad_residual
    )
    return grad_x, grad_residual, grad_weight.clone(), grad_bias.clone()


@batch_norm_act_backward.register_fake
def _(
    grad: Tensor, x: Tensor, y: Tensor | None, saved: Tensor, weight: Tensor, bias: Tensor,
    eps: float, negative_slope: float, has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    own = has_residual and negative_slope != 1
    grad_residual = torch.empty_like(x) if own else x.new_empty(0)
    return torch.empty_like(x), grad_residual, torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, bias, eps, negative_slope = inputs
    y, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    keeps_y = negative_slope != 1 and residual is not None
    ctx.save_for_backward(x, y if keeps_y else None, saved, weight, bias)
    ctx.options = (eps, negative_slope, residual is not None)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    grad_x, grad_residual, grad_weight, grad_bias = batch_norm_act_backward(
        grad, *ctx.saved_tensors, *ctx.options
    )
    _, negative_slope, has_residual = ctx.options
    of_residual = grad if negative_slope == 1 else grad_residual
    return grad_x, of_residual if has_residual else None, grad_weight, grad_bias, None, None


batch_norm_act.register_autograd(_backward, setup_context=_setup_context)


@torch._disable_dynamo
def run_function(*inputs: Any) -> Tensor:
    y: Tensor = BatchNormActFunction.apply(*inputs)
    return y
