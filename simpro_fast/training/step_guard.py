"""Stops all ranks together: at a loss that is not finite before it can spread, or on request."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from simpro_fast.distributed.process_group import Ranks
from simpro_fast.utils.errors import UserError


class NonFiniteLossError(UserError):
    """The loss of a step is NaN or infinite; `step` is 0-based."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss of step {step} is not finite; lower optim.lr or set optim.grad_clip, and "
            "start again, which goes on from the last checkpoint"
        )
        self.step = step


class StepGuard:
    """Agrees with the other ranks, in one small collective per step, on two questions.

    Is a loss not finite? On CPU `watch` raises at once, so the weights stay clean. On CUDA the
    answers travel to the host while the device goes on, and are obeyed when the next step is
    watched: the host waits only where it is a whole step ahead of the device, which costs nothing.
    A bad step has then moved weights, average and counts in memory, so `settle` comes before
    anything is made of them: priors, evaluation, checkpoints.

    Has any rank been asked to stop? Then `stop_agreed` becomes true in the same step on all (on
    CUDA one later).

    Args:
        ranks: that agree.
        stop_requested: whether this rank has been asked to stop; looked at in every `watch`.
    """

    def __init__(self, ranks: Ranks, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self._ranks, self._stop_requested = ranks, stop_requested
        self.stop_agreed = False
        self._step: int | None = None  # whose answers nobody has looked at yet
        self._cuda = ranks.device.type == "cuda"
        if self._cuda:
            self._host = torch.zeros(2, pin_memory=True)
            self._copied = torch.cuda.Event()

    def watch(self, loss: Tensor, step: int) -> None:
        """Look at the loss of step `step`, [], over all ranks.

        Raises:
            NonFiniteLossError: it is not finite; on CUDA that of the step before was not.
        """
        self.settle()
        bad = (~torch.isfinite(loss.detach())).to(torch.float32).reshape(())
        asked = torch.full_like(bad, float(self._stop_requested()))
        answers = self._ranks.sum(torch.stack((bad, asked)))
        if self._cuda:
            self._step = step
            self._host.copy_(answers, non_blocking=True)
            self._copied.record()
        elif answers.any().item():  # the one read of a usual step
            self._obey(answers, step)

    def asked_to_stop(self) -> bool:
        """Whether any rank has been asked, now; a collective, so every rank calls it."""
        asked = torch.tensor([float(self._stop_requested())], device=self._ranks.device)
        self.stop_agreed = self.stop_agreed or bool(self._ranks.sum(asked).item())
        return self.stop_agreed

    def settle(self) -> None:
        """Obey the answers of the last step watched, if that has not been done.

        Raises:
            NonFiniteLossError: its loss was not finite.
        """
        if self._step is not None:
            step, self._step = self._step, None
            self._copied.synchronize()
            self._obey(self._host, step)

    def _obey(self, answers: Tensor, step: int) -> None:
        bad, asked = answers.tolist()
        self.stop_agreed = self.stop_agreed or asked > 0
        if bad:
            raise NonFiniteLossError(step)
