"""Batch norm over several ranks: synchronised statistics, or averaged buffers.

The engines leave batch-norm buffers to the ranks, so without one of the two the ranks' networks
part although their weights are equal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from simpro_kernels import BatchNormAct
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def convert_sync_batch_norm(
    model: nn.Module, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Let the training statistics of every batch norm cover the batches of all ranks.

    Our own batch norms are told so, others are replaced by ours with the same parameters and
    buffers. Ranks may differ in N. Call it before the engine wraps the model. Names in the state
    dict stay.

    Args:
        model: changed in place, unless it is a batch norm of another kind itself.
        process_group: ranks that share statistics; None: all.

    Returns:
        The converted model.
    """
    if isinstance(model, _BatchNorm):
        norm = model if isinstance(model, BatchNormAct) else _as_ours(model)
        norm.synchronised, norm.process_group = True, process_group
        return norm
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batch_norm(child, process_group))
    return model


def _as_ours(norm: _BatchNorm) -> BatchNormAct:
    converted = BatchNormAct(
        norm.num_features,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
    )
    # The tensors themselves move over, so that an optimizer or average that holds them keeps them.
    converted._parameters, converted._buffers = norm._parameters, norm._buffers
    return converted.train(norm.training)


def average_buffers(model: nn.Module) -> None:
    """Replace the float buffers by their mean over the ranks, in one collective.

    For `distributed.sync_bn: average_buffers`, before the EMA, an evaluation or a
    checkpoint reads them; afterwards they are equal on all ranks bit for bit. All ranks must call
    it. Integer buffers count steps and are equal already. Does nothing on a single rank.
    """
    _share_buffers(model, first_rank_only=False)


def first_rank_buffers(model: nn.Module) -> None:
    """Replace the float buffers by those of the first rank, as DDP does; else `average_buffers`.

    For `distributed.sync_bn: false`.
    """
    _share_buffers(model, first_rank_only=True)


@torch.no_grad()
def _share_buffers(model: nn.Module, *, first_rank_only: bool) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        return
    world_size = dist.get_world_size()
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world_size == 1 or not buffers:
        return
    packed = torch.cat([buffer.double().flatten() for buffer in buffers])
    if first_rank_only:
        dist.broadcast(packed, src=0)
    else:
        dist.all_reduce(packed)
        packed /= world_size
    parts = packed.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
