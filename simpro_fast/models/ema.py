"""Exponential moving average of a network's weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class ModelEMA:
    """The averaged network that is evaluated and exported.

    After every optimizer step: average <- d * average + (1 - d) * weight for all parameters, in
    float32 (or float64 where the network is float64), whatever the network's own dtype: in bf16
    and fp16 a decay of 0.999 rounds every change away. Buffers, batch-norm statistics included,
    are copied, as in the published code; integer buffers are never averaged.

    Args:
        model: the bare network (not wrapped by an engine, DDP or torch.compile), on its device.
        decay: d in [0, 1).
        warmup: use min(d, (1 + s) / (10 + s)) at step s, counted from 0; short runs need it,
            since the initial weights otherwise keep a share of d ** steps.

    Attributes:
        module: the average, a copy of `model` in eval mode whose tensors need no gradient.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        # Synchronised batch norms refer to a process group, which is shared and cannot be copied.
        groups = [group for m in model.modules() if (group := getattr(m, "process_group", None))]
        self.module = copy.deepcopy(model, {id(group): group for group in groups})
        self.module.eval().requires_grad_(False)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.data = _average_precision(tensor.data)
        self.decay = decay
        self.warmup = warmup
        self._model = model
        self._layouts_match = False

    def decay_at(self, step: int) -> float:
        """Decay of the update that follows step `step` (counted from 0)."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    def update(self, step: int) -> None:
        """Move the average towards the network as it is after step `step` (counted from 0)."""
        self.follow(self.decay_at(step))

    @torch.no_grad()
    def follow(self, decay: float | Tensor) -> None:
        """`update` with a given decay d; as a tensor [] it may change under a CUDA graph."""
        if not self._layouts_match:
            self._match_layouts()
        averages: list[Tensor] = list(self.module.parameters())
        weights = [
            weight if weight.dtype == average.dtype else weight.to(average.dtype)
            for average, weight in zip(averages, self._model.parameters(), strict=True)
        ]
        if averages:
            if isinstance(decay, Tensor):
                torch._foreach_mul_(averages, decay)
                torch._foreach_add_(averages, torch._foreach_mul(weights, 1.0 - decay))
            else:
                torch._foreach_lerp_(averages, weights, 1.0 - decay)
        pairs = list(zip(self.module.buffers(), self._model.buffers(), strict=True))
        for floating in (True, False):
            chosen = [pair for pair in pairs if pair[0].is_floating_point() == floating]
            if chosen:
                torch._foreach_copy_([pair[0] for pair in chosen], [pair[1] for pair in chosen])

    def _match_layouts(self) -> None:
        """Give the average the network's strides, which engines change after it was copied.

        One fused operation over all parameters needs equal strides.
        """
        for average, weight in zip(self.module.parameters(), self._model.parameters(), strict=True):
            if average.stride() != weight.stride():
                laid_out = torch.empty_strided(
                    weight.shape, weight.stride(), dtype=average.dtype, device=average.device
                )
                average.data = laid_out.copy_(average)
        self._layouts_match = True

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged network's state; with the step it is the whole state of the average."""
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave; missing or unknown names are a RuntimeError."""
        self.module.load_state_dict(state)


def _average_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
