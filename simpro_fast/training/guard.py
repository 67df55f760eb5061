"""Stops all ranks together when a loss is not finite, before it can spread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simpro_fast.errors import UserError
from simpro_fast.training.ranks import Ranks


class NonFiniteLossError(UserError):
    """The loss of a step is NaN or infinite; `step` is 0-based."""

    def __init__(self, step: int, hint: str = "") -> None:
        super().__init__(f"the loss of step {step} is not finite{hint}")
        self.step = step


def refuse_non_finite(state: dict[str, Any], step: int) -> None:
    """Keep a checkpoint clean: an overflow of the gradient can spoil weights under a finite loss.

    Raises:
        UserError: a weight or an average of `state` (see `Trainer.state`) is NaN or infinite.
    """
    for part in ("model", "ema"):
        floating = [t for t in state[part].values() if t.is_floating_point()]
        norms = torch.stack(torch._foreach_norm(floating, torch.inf))
        if not bool(torch.isfinite(norms).all()):
            raise UserError(
                f"after step {step} a weight ({part}) is not finite; nothing was saved, earlier "
                "checkpoints are kept. Lower optim.lr or set optim.grad_clip"
            )


class FiniteGuard:
    """Watches one loss per step over all ranks.

    On CPU `watch` raises at once, so the weights stay clean. On CUDA it copies a flag to the host
    without waiting and `confirm`, called after the optimizer step is queued, waits for the copy:
    that is the end of this step's forward pass, while the device still has the backward pass to
    do. The EMA and checkpoints come after `confirm` and never see a bad step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._cuda = ranks.device.type == "cuda"
        if self._cuda:
            self._host = torch.zeros(1, pin_memory=True)
            self._copied = torch.cuda.Event()

    def watch(self, loss: Tensor, step: int) -> None:
        bad = (~torch.isfinite(loss.detach())).to(torch.float32).reshape(1)
        self._ranks.sum(bad)
        self._step = step
        if self._cuda:
            self._host.copy_(bad, non_blocking=True)
            self._copied.record()
        elif bad.item():
            raise NonFiniteLossError(step)

    def confirm(self) -> None:
        if self._cuda:
            self._copied.synchronize()
            if self._host.item():
                raise NonFiniteLossError(self._step)
