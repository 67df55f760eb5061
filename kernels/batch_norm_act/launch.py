"""Forward and backward by the kernels; the signatures are those of the eager twin.

Legend: M = N*H*W rows of C channels. A row of statistics [2 C + 1] holds mean, biased variance and
number of rows.
"""

from collections.abc import Callable

import torch
import triton
from simpro_kernels.batch_norm_act.plans import Problem, kept_launcher
from simpro_kernels.launch import Launcher, arrivals
from simpro_kernels.tl_utils import alignment
from torch import Tensor


def forward(
    x: Tensor,  # [M, C] contiguous, like residual
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    negative_slope: float,
    gather: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """y [M, C] and the statistics [2 C + 1], float32.

    ``gather`` turns the statistics of this rank [2 C + 1] into those of all ranks [G, 2 C + 1].
    """
    rows, channels = x.shape
    running = running_mean is not None
    saved = torch.empty(2 * channels + 1, dtype=torch.float32, device=x.device)
    moving = (running_mean, running_var) if running else (saved, saved)
    if rows == 0:
        saved.zero_()
    else:
        kernel = _kernel("statistics", x.device, channels, running and gather is None, x)
        programs, tiles_each = _split(kernel, rows)
        kernel(
            programs * _blocks(kernel),
            x,
            saved.new_empty(programs, len(saved)),
            saved,
            *moving,
            arrivals(x.device, _blocks(kernel)),
            rows,
            tiles_each,
            momentum,
        )
    if gather is not None:
        merge = _kernel("merge", x.device, channels, running)
        ranks = gather(saved)
        saved = torch.empty_like(saved)
        moving = moving if running else (saved, saved)
        merge(_blocks(merge), ranks, saved, *moving, len(ranks), momentum)
    y = torch.empty_like(x)
    kernel = _kernel("apply", x.device, channels, residual is not None, x, residual, y)
    added = y if residual is None else residual
    kernel(_grid(kernel, rows), x, added, y, saved, weight, bias, rows, eps, negative_slope)
    return y, saved


def backward(
    grad: Tensor,  # [M, C] contiguous, like x and y
    x: Tensor,
    y: Tensor | None,  # needed with a residual and an activation
    saved: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    has_residual: bool,
    all_reduce: Callable[[Tensor], object] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, weight and bias; ``all_reduce`` adds up a tensor over the ranks."""
    rows, channels = x.shape
    masked = has_residual and negative_slope != 1
    if y is None:
        y = x
    total = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    if rows == 0:
        total.zero_()
    else:
        sums = _kernel("sums", x.device, channels, masked, x, y, grad)
        programs, tiles_each = _split(sums, rows)
        sums(
            programs * _blocks(sums),
            x,
            y,
            grad,
            saved,
            weight,
            bias,
            saved.new_empty(programs, 2, channels),
            total,
            arrivals(x.device, _blocks(sums)),
            rows,
            tiles_each,
            eps,
            negative_slope,
        )
    grad_weight, grad_bias = total.to(weight.dtype, copy=all_reduce is not None)
    if all_reduce is not None:
        all_reduce(total)
    grad_x = torch.empty_like(x)
    grad_residual = torch.empty_like(x) if masked else grad
    kernel = _kernel("gradient", x.device, channels, masked, x, y, grad, grad_x, grad_residual)
    kernel(
        _grid(kernel, rows),
        x,
        y,
        grad,
        grad_x,
        grad_residual,
        saved,
        weight,
        bias,
        total,
        rows,
        eps,
        negative_slope,
    )
    return grad_x, grad_residual, grad_weight, grad_bias


def _kernel(
    name: str, device: torch.device, channels: int, flag: bool, *matrices: Tensor | None
) -> Launcher:
    """The kernel for matrices [M, C] of one dtype; without any, of statistics."""
    first = matrices[0] if matrices else None
    dtype = torch.float32 if first is None else first.dtype
    problem = Problem(name, channels, dtype, alignment(*matrices), flag)
    return kept_launcher(problem, device)


def _blocks(kernel: Launcher) -> int:
    """Blocks of channels: so many programs share the rows of one."""
    blocks: int = triton.cdiv(kernel.constants["C"], kernel.constants["BLOCK"])
    return blocks


def _split(kernel: Launcher, rows: int) -> tuple[int, int]:
    """Programs for each block of channels, and tiles of rows for each of them."""
    tiles = max(1, rows // kernel.constants["ROWS"])
    blocks = _blocks(kernel)
    most = max(1, kernel.plan.programs(tiles * blocks, kernel.device) // blocks)
    tiles_each = triton.cdiv(tiles, most)
    return triton.cdiv(tiles, tiles_each), tiles_each


def _grid(kernel: Launcher, rows: int) -> int:
    tiles = triton.cdiv(rows, kernel.constants["ROWS"])
    return max(1, triton.cdiv(tiles, kernel.constants["PER"])) * _blocks(kernel)
