"""The eager twin of the kernels: plain PyTorch, any device, the test oracle in float64.

torch's own channels_last batch norm adds up the rows of a channel one after the other in float32 on
the CPU: at 1.7 million rows its variance is 1e-3 too low. Here neighbouring rows are folded into
one longer row, whose sums are shorter and are merged in float64 (Chan et al., 1979). Long rows suit
vectors and threads, so this is faster as well.

Legend: M = N*H*W rows of C channels; k rows in a folded one; G sums to merge. A row of statistics
[2 C + 1] holds mean, biased variance and number of rows.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from simpro_kernels.checks import accumulation_dtype
from torch import Tensor
from torch.nn import functional

_FOLDED = 1024  # Columns, of which the sums stay in the L1 cache.
_ROWS = 4096  # That a thread adds up one after the other.
# Up to so many torch's own backward is faster, and from exact statistics good to 2e-6.
_ROWS_BACKWARD = 32768
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward


def plain(
    x: Tensor,  # [N, C, ...]
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    negative_slope: float,
) -> Tensor:
    """torch's operators one after the other, for where they are exact."""
    y = functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if residual is not None:
        y = y + residual
    return y if negative_slope == 1 else functional.leaky_relu_(y, negative_slope)


def is_plain_exact(x: Tensor) -> bool:
    """Whether torch's batch norm of x [N, C, ...] in training is as exact as its dtype allows."""
    return (
        torch.compiler.is_compiling()  # first: the number of threads would break a traced graph
        or x.device.type != "cpu"
        or x.dtype == torch.float64
        or x.is_contiguous()
        or x.numel() <= _ROWS * torch.get_num_threads() * x.shape[1]
    )


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
    """y [M, C] and the statistics [2 C + 1] for `backward`, float32 unless x is float64.

    ``gather`` turns the statistics of this rank [2 C + 1] into those of all ranks [G, 2 C + 1].
    """
    dtype, x = x.dtype, x.to(accumulation_dtype(x))
    row = statistics(x)
    if gather is not None:
        rows = gather(row)
        row = _merge(rows[:, :-1], rows[:, -1])
    saved = row.to(x.dtype)
    move(running_mean, running_var, saved, momentum)
    mean, variance, _ = _parts(saved)
    y = _batch_norm(x, mean, variance, weight, bias, eps)
    if residual is not None:
        y += residual
    if negative_slope != 1:
        functional.leaky_relu_(y, negative_slope)
    return y.to(dtype), saved


@torch.no_grad()
def move(
    running_mean: Tensor | None, running_var: Tensor | None, saved: Tensor, momentum: float
) -> None:
    """The running statistics towards those of the batch; the variance is the unbiased one."""
    if running_mean is None or running_var is None:
        return
    mean, variance, count = _parts(saved)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    unbiased = variance * (count / (count - 1))
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)


def statistics(x: Tensor) -> Tensor:
    """The row of statistics [2 C + 1] of [M, C], float64; zeros where there are no rows."""
    if len(x) == 0:
        return x.new_zeros(2 * x.shape[1] + 1, dtype=torch.float64)
    moments, counts = [], []
    for (piece,) in _pieces(x):
        mean, variance = torch.batch_norm_update_stats(piece[..., None, None], None, None, 0.0)
        moments.append(torch.stack([mean.view(-1, x.shape[1]), variance.view(-1, x.shape[1])], 1))
        counts += [len(piece)] * len(moments[-1])
    rows = torch.cat(moments).double().flatten(1)
    return _merge(rows, rows.new_tensor(counts))


def _merge(moments: Tensor, counts: Tensor) -> Tensor:
    """Means and variances [G, 2 C] of so many rows each [G], to the statistics [2 C + 1] of all."""
    means, variances = moments.chunk(2, 1)
    count = counts.sum(0, keepdim=True)
    weights = counts / count
    mean = weights @ means
    apart = means - mean
    return torch.cat([mean, weights @ torch.addcmul(variances, apart, apart), count])


def backward(
    grad: Tensor,  # [M, C] contiguous, like x and y
    x: Tensor,
    y: Tensor,
    saved: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    has_residual: bool,
    all_reduce: Callable[[Tensor], object] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, weight and bias; ``all_reduce`` adds up a tensor over the ranks."""
    channels = x.shape[1]
    mean, variance, count = _parts(saved)
    invstd = (variance + eps).rsqrt()
    # The gradient behind the activation, which is the residual's.
    inner = grad
    if negative_slope != 1:
        inner = torch.ops.aten.leaky_relu_backward(grad, y, negative_slope, True)
    dtype, x, inner = x.dtype, x.to(saved.dtype), inner.to(saved.dtype)
    if all_reduce is None and len(x) <= _ROWS_BACKWARD * torch.get_num_threads():
        grad_x, grad_weight, grad_bias = _batch_norm_backward(
            inner[..., None, None],
            x[..., None, None],
            weight,
            None,
            None,
            mean,
            invstd,
            True,
            eps,
            [True, True, True],
        )
        return grad_x.view(x.shape).to(dtype), inner.to(dtype), grad_weight, grad_bias
    sums = []
    for piece, of_inner in _pieces(x, inner):
        long_mean, long_invstd = _folded(piece, mean, invstd)
        sums += _batch_norm_backward(
            of_inner[..., None, None],
            piece[..., None, None],
            None,
            None,
            None,
            long_mean,
            long_invstd,
            True,
            eps,
            [False, True, True],
        )[1:]
    total = torch.stack(sums).view(len(sums) // 2, 2, -1, channels).sum((0, 2), dtype=torch.float64)
    grad_weight, grad_bias = total.to(weight.dtype, copy=all_reduce is not None).unbind()
    if all_reduce is not None:
        all_reduce(total)
    # grad_x = scale (g - average(g) - x^ average(g x^)) with x^ = (x - mean) invstd.
    less_of_weight, less_of_bias = (total / -count).to(saved.dtype).unbind()
    scale, slope = invstd * weight, invstd * less_of_weight
    shift = scale * torch.addcmul(less_of_bias, slope, mean, value=-1)
    long_x, long_inner = _fold(x), _fold(inner)
    slope, scale, shift = _folded(long_x, slope, scale, shift)
    if inner is not grad and not has_residual:
        grad_x = long_inner.addcmul_(long_x, slope)
    else:
        grad_x = torch.addcmul(long_inner, long_x, slope)
    torch.addcmul(shift, grad_x, scale, out=grad_x)
    return grad_x.view(x.shape).to(dtype), inner.to(dtype), grad_weight, grad_bias


def _parts(saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C], variance [C], count [1]."""
    channels = len(saved) // 2
    mean, variance, count = saved.split([channels, channels, 1])
    return mean, variance, count


def _batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return functional.batch_norm(
        x[..., None, None], mean, variance, weight, bias, False, 0.0, eps
    ).view(x.shape)


@functools.lru_cache(256)
def _rows_in_one(rows: int, channels: int) -> int:
    """The largest divisor of the number of rows that keeps a folded row short."""
    return next(k for k in range(max(1, _FOLDED // channels), 0, -1) if rows % k == 0)


def _fold(x: Tensor) -> Tensor:
    """[M, C] as [M / k, k C]."""
    return x.view(-1, _rows_in_one(max(1, len(x)), x.shape[1]) * x.shape[1])


def _folded(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Numbers of the channels [C] for a folded x: [k C]."""
    return torch.stack(vectors).repeat(1, x.shape[1] // len(vectors[0])).unbind()


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors folded, so many rows at a time that no sum gets long."""
    long = [_fold(tensor) for tensor in tensors]
    on_cpu = long[0].device.type == "cpu"
    rows = _ROWS * torch.get_num_threads() if on_cpu else max(1, len(long[0]))
    return zip(*(tensor.split(rows) for tensor in long), strict=True)
