"""A whole training step as one CUDA graph: the host launches once where it launched hundreds.

What changes from step to step enters through static tensors: the batch, the learning rate and the
decay of the average. Everything else of a step reads and writes memory that stays where it is:
weights, optimizer slots, average, priors and counts.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from simpro_kernels.launch import shared_arrivals

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.methods import MethodOutput
from simpro_fast.training.engine.compile import why_not_captured
from simpro_fast.training.step import Step, WeakPass
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Runs before a capture: they compile kernels, choose algorithms, allocate optimizer slots."""


def build_step_graph(config: Config, ranks: Ranks, algorithm: Step) -> StepGraph | None:
    """The step as a graph where the configuration asks for it; a log line where it cannot be."""
    if config.train.compile != "cuda-graphs":
        return None
    reason = why_not_captured(config, ranks)
    if reason is not None:
        said = "train.compile=cuda-graphs is train.compile=default here: %s"
        logger.warning(said, reason, extra=FOUND_BY_ALL)
        return None
    return StepGraph(algorithm, CudaRecorder(ranks.device))


@dataclass(frozen=True)
class Recording:
    """What `replay` does again; its results are in `result`, in the same memory each time."""

    result: Any
    replay: Callable[[], None]


class Recorder(Protocol):
    """Runs a function once in a way that can be repeated with one call."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Run it as it is, where the recording will run."""

    def record(self, function: Callable[[], Any]) -> Recording:
        """Record it, which does nothing yet; it works on the current contents of its memory."""

    def forget(self) -> None:
        """The recordings so far are not replayed any more."""


class CudaRecorder:
    """`torch.cuda.CUDAGraph` with the side stream that captures ask for.

    The graphs share their memory: they run one after another, and nothing but the weak pass, which
    is recorded first, has to outlive the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch hands out 32 streams of a priority in turn, so that of usual priority a pipeline
        # built later may get this one, and launch into a capture.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.forget()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Any]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: the data pipeline's allocates and waits meanwhile.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with shared_arrivals(), capture:
            result = function()
        return Recording(result, graph.replay)

    def forget(self) -> None:
        # The memory of graphs that are all gone is given back, and cannot be asked for again.
        self._pool = torch.cuda.graph_pool_handle()


class StepGraph:
    """Calls the step for the first times, then replays a recording of it.

    With `strong_forward=confident` there are several: the weak pass, and one for each number of
    images whose strong views run, which the host reads between the two.

    Args:
        algorithm: its `step` looks at no value on the host.
        recorder: of the device.
    """

    def __init__(self, algorithm: Step, recorder: Recorder) -> None:
        self._algorithm, self._recorder = algorithm, recorder
        self._static: Batch | None = None
        self._lr = self._decay = torch.empty(0)
        self._in_two = algorithm.setup.config.train.strong_forward == "confident"
        self._recorded: dict[str, Recording] = {}
        self._seen: collections.Counter[str] = collections.Counter()

    def __call__(self, batch: Batch, lr: float, decay: float) -> MethodOutput:
        """One step on this batch; the result is overwritten by the next call."""
        static = self._copied(batch)
        self._lr.fill_(lr)
        self._decay.fill_(decay)
        begun = images = None
        if self._in_two:
            weak: WeakPass = self._run("weak", lambda: self._algorithm.weak_pass(static))
            images = weak.images()
            begun = weak, images
        key = "all" if images is None else f"{len(images)} images"
        step = functools.partial(self._algorithm.step, static, self._lr, self._decay, begun=begun)
        out: MethodOutput = self._run(key, step)
        return out

    def forget(self) -> None:
        """Record anew: another phase of the method, or other tensors behind the step."""
        self._recorded.clear()
        self._seen.clear()
        self._recorder.forget()

    def _run(self, key: str, function: Callable[[], Any]) -> Any:
        if self._seen[key] < WARM_UP:
            self._seen[key] += 1
            return self._recorder.warm_up(function)
        if key not in self._recorded:
            self._recorded[key] = self._recorder.record(function)
        self._recorded[key].replay()
        return self._recorded[key].result

    def _copied(self, batch: Batch) -> Batch:
        """The batch in memory that stays."""
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
        return self._static
