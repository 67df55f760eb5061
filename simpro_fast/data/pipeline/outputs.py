"""Outputs of a DALI pipeline as torch tensors, whose memory stays until the device has read it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class Outputs:
    """Runs a pipeline, and holds the memory of its outputs while queued work may read it.

    A tensor that comes by DLPack shares DALI's memory, and DALI knows nothing of torch's streams:
    when the last reference on the host is gone it fills the memory anew, while the training stream
    has the backward pass of that batch still before it. So the outputs of a run are held until an
    event has passed that the current stream records when the next run begins: work on a batch must
    be queued before the next batch is asked for. On a CPU nothing is held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest: list[Tensor] = []
        self._held: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def run(self, pipe: Any) -> list[Tensor]:
        """The outputs of the pipeline's next run, on its device, without a copy.

        Raises:
            Exception: whatever DALI raises.
        """
        if self._device.type != "cuda":
            return _tensors(pipe.run())
        stream = torch.cuda.current_stream(self._device)
        self._mark(stream)
        while self._held and self._held[0][0].query():
            self._held.popleft()
        self._latest = _tensors(pipe.run(stream))
        return self._latest

    def close(self) -> None:
        """Let go of everything, once the device has passed it."""
        if self._latest:
            self._mark(torch.cuda.current_stream(self._device))
        if self._held:
            self._held[-1][0].synchronize()
            self._held.clear()

    def _mark(self, stream: torch.cuda.Stream) -> None:
        if self._latest:
            self._held.append((stream.record_event(), self._latest))
            self._latest = []


def _tensors(outputs: Any) -> list[Tensor]:
    return [torch.from_dlpack(output.as_tensor()) for output in outputs]
