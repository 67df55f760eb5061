"""Batch norm over several ranks: synchronised statistics, or averaged buffers.

The engines leave batch-norm buffers to the ranks, so without one of the two the ranks' networks
part although their weights are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks; the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grads[0], ctx.group), None


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics cover the batches of all ranks, for CPU tensors.

    torch's own refuses CPU tensors under a process group. Takes [N, C, ...] of any float dtype,
    ranks may differ in N; half precision is computed in float32 and returned as it came. The
    variance is that of centred values; the running one is unbiased over the global count.
    """

    def __init__(
        self, num_features: int, *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(num_features, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm takes [N, C, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        x = input if input.dtype == torch.float64 else input.float()

        size = x.new_tensor([x.numel() // x.shape[1]])
        sums = _AllReduceSum.apply(torch.cat([x.sum(dims), size]), self.process_group)
        count = sums[-1].detach()
        if count <= 1:
            raise ValueError(
                "batch norm in training needs more than one value per channel over all ranks, "
                f"got {list(input.shape)}"
            )
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        squares = _AllReduceSum.apply(centred.square().sum(dims), self.process_group)
        variance = squares / count
        self._track(mean.detach(), (squares / (count - 1)).detach())

        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None  # All three buffers exist together.
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            weight = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), weight)


def convert_sync_batch_norm(
    model: nn.Module, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Replace every batch norm by a synchronised one that holds the same parameters and buffers.

    Call it before the engine wraps the model, with the model on its final device: batch norms on
    CUDA become torch's `SyncBatchNorm`, those on the CPU ours. Names in the state dict stay.

    Args:
        model: changed in place, unless it is a batch norm itself.
        process_group: ranks that share statistics; None: all.

    Returns:
        The converted model.
    """
    if isinstance(model, nn.SyncBatchNorm | SyncBatchNorm):
        return model
    if isinstance(model, _BatchNorm):
        return _synchronised(model, process_group)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batch_norm(child, process_group))
    return model


def _synchronised(norm: _BatchNorm, process_group: dist.ProcessGroup | None) -> nn.Module:
    tensors = (*norm.parameters(), *norm.buffers())
    if any(tensor.is_cuda for tensor in tensors):
        return nn.SyncBatchNorm.convert_sync_batchnorm(norm, process_group)
    converted = SyncBatchNorm(
        norm.num_features,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
        process_group=process_group,
    )
    # The tensors themselves move over, so that an optimizer or average that holds them keeps them.
    converted._parameters, converted._buffers = norm._parameters, norm._buffers
    return converted.train(norm.training)


def average_buffers(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace the float buffers by their mean over the ranks, in one collective.

    For `distributed.sync_bn: average_buffers`, before the EMA, an evaluation or a
    checkpoint reads them; afterwards they are equal on all ranks bit for bit. All ranks must call
    it. Integer buffers count steps and are equal already. Does nothing on a single rank.
    """
    _share_buffers(model, process_group, first_rank_only=False)


def first_rank_buffers(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace the float buffers by those of the first rank, as DDP does; else `average_buffers`.

    For `distributed.sync_bn: false`.
    """
    _share_buffers(model, process_group, first_rank_only=True)


@torch.no_grad()
def _share_buffers(
    model: nn.Module, process_group: dist.ProcessGroup | None, *, first_rank_only: bool
) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    world_size = dist.get_world_size(process_group)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world_size == 1 or not buffers:
        return
    packed = torch.cat([buffer.double().flatten() for buffer in buffers])
    if first_rank_only:
        dist.broadcast(packed, group_src=0, group=process_group)
    else:
        dist.all_reduce(packed, group=process_group)
        packed /= world_size
    parts = packed.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
