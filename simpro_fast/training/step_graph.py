"""A whole training step as one CUDA graph: the host launches once where it launched hundreds.

What changes from step to step enters through static tensors: the batch, the learning rate and the
decay of the average. Everything else of a step reads and writes memory that stays where it is:
weights, optimizer slots, average, priors and counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.methods import MethodOutput
from simpro_fast.training.engine.compile import why_not_captured
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Steps before the capture: they compile kernels, choose algorithms, allocate optimizer slots."""

Learn = Callable[[Batch, Tensor, Tensor], MethodOutput]
"""(batch, learning rate [], decay of the average []) -> what the method returned: one step."""


def build_step_graph(config: Config, ranks: Ranks, learn: Learn) -> StepGraph | None:
    """The step as one graph where the configuration asks for it; a log line where it cannot be."""
    if config.train.compile != "cuda-graphs":
        return None
    reason = why_not_captured(config, ranks)
    if reason is not None:
        said = "train.compile=cuda-graphs is train.compile=default here: %s"
        logger.warning(said, reason, extra=FOUND_BY_ALL)
        return None
    return StepGraph(learn, CudaRecorder(ranks.device))


class Recorder(Protocol):
    """Runs a function once in a way that can be repeated with one call."""

    def warm_up(self, function: Callable[[], MethodOutput]) -> MethodOutput:
        """Run it as it is, where the recording will run."""

    def record(self, function: Callable[[], MethodOutput]) -> MethodOutput:
        """Record it; its results are those of the last `replay`."""

    def replay(self) -> None:
        """Do what was recorded, on the current contents of the same memory."""

    def forget(self) -> None:
        """Drop what was recorded; another recording follows."""


class CudaRecorder:
    """`torch.cuda.CUDAGraph` with the side stream that captures ask for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], MethodOutput]) -> MethodOutput:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], MethodOutput]) -> MethodOutput:
        # Of this thread alone: the data pipeline's allocates and waits meanwhile.
        capture = torch.cuda.graph(
            self._graph, stream=self._stream, capture_error_mode="thread_local"
        )
        with capture:
            return function()

    def replay(self) -> None:
        self._graph.replay()

    def forget(self) -> None:
        self._graph.reset()


class StepGraph:
    """Calls `learn` for the first steps, then replays a recording of it.

    Args:
        learn: one step of training without a look at any value on the host.
        recorder: of the device.
    """

    def __init__(self, learn: Learn, recorder: Recorder) -> None:
        self._learn, self._recorder = learn, recorder
        self._static: Batch | None = None
        self._lr = self._decay = torch.empty(0)
        self._seen = 0
        self._out: MethodOutput | None = None

    def __call__(self, batch: Batch, lr: float, decay: float) -> MethodOutput:
        """One step on this batch; the result is overwritten by the next call."""
        if self._static is None:
            self._static = Batch(
                step=batch.step,
                views=torch.empty_like(batch.views),
                truth=batch.truth,  # diagnostics, which are no part of the step
                **{name: torch.empty_like(t) for name, (_, t) in batch.by_image().items()},
            )
            # float32 beside views that may come in bfloat16, where a decay of 0.999 would be 1.
            device = batch.views.device
            self._lr, self._decay = (
                torch.empty((), dtype=torch.float32, device=device) for _ in range(2)
            )
        self._static.views.copy_(batch.views)
        given = batch.by_image()
        for name, (_, static) in self._static.by_image().items():
            static.copy_(given[name][1])
        self._lr.fill_(lr)
        self._decay.fill_(decay)
        if self._seen < WARM_UP:
            self._seen += 1
            return self._recorder.warm_up(self._step)
        if self._out is None:
            self._out = self._recorder.record(self._step)
        self._recorder.replay()
        return self._out

    def forget(self) -> None:
        """Record anew: another phase of the method, or other tensors behind the step."""
        if self._out is not None:
            self._recorder.forget()
        self._out, self._seen = None, 0

    def _step(self) -> MethodOutput:
        assert self._static is not None
        return self._learn(self._static, self._lr, self._decay)
