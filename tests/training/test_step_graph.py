"""The step as one graph: static memory, scalars that change, and the same training."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.methods import MethodOutput
from simpro_fast.training.engine.compile import why_not_captured
from simpro_fast.training.step import Step, WeakPass
from simpro_fast.training.step_graph import (
    WARM_UP,
    CudaRecorder,
    Recording,
    StepGraph,
    build_step_graph,
)
from simpro_fast.training.trainer import Trainer
from tests.training.test_trainer import synthetic

MakeConfig = Callable[..., Config]


def cloned(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().clone()
    if isinstance(result, tuple):
        return tuple(map(cloned, result))
    if is_dataclass(result):
        return type(result)(*(cloned(getattr(result, f.name)) for f in fields(result)))
    return result


def fill(static: Any, new: Any) -> None:
    if isinstance(static, Tensor):
        static.copy_(new.detach())
    elif isinstance(static, tuple):
        for into, value in zip(static, new, strict=True):
            fill(into, value)
    elif is_dataclass(static):
        for f in fields(static):
            fill(getattr(static, f.name), getattr(new, f.name))


class RunAgain:
    """A recorder for the CPU: a replay runs the function and fills the recorded results."""

    def __init__(self) -> None:
        self.calls = collections.Counter[str]()
        self._last: dict[type, Any] = {}

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.calls["warm_up"] += 1
        result = function()
        self._last[type(result)] = cloned(result)
        return result

    def record(self, function: Callable[[], Any]) -> Recording:
        self.calls["record"] += 1  # recording does nothing yet, as a capture

        def replay() -> None:
            self.calls["replay"] += 1
            fill(result, function())

        of_step = isinstance(function, functools.partial)
        result = cloned(self._last[MethodOutput if of_step else WeakPass])
        return Recording(result, replay)

    def forget(self) -> None:
        self.calls["forget"] += 1


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.weak_forward": "no_grad", "optim.grad_clip": 1.0},
        {"train.weak_forward": "no_grad", "train.strong_forward": "confident"},
        {"train.ema_warmup": True},
    ],
    ids=["published", "two passes", "confident", "decay that changes"],
)
def test_replayed_steps_train_as_the_usual_ones(tiny: MakeConfig, changes: dict[str, Any]) -> None:
    config = tiny({"distributed.engine": "plain", "optim.warmup_steps": 4, **changes})
    usual, graphed = (
        Trainer(config, start_ranks(config), make_loader=synthetic(), write=False) for _ in range(2)
    )
    recorder = RunAgain()
    graphed.step_graph = StepGraph(graphed.algorithm, recorder)
    for step in range(8):
        usual.train_step()
        graphed.train_step()
        assert torch.allclose(usual.meter.sums, graphed.meter.sums, rtol=1e-6)
        if step == 5:
            usual.algorithm.method.update_priors()
            graphed.algorithm.method.update_priors()
    if changes.get("train.strong_forward"):
        assert recorder.calls["record"] >= 2 and recorder.calls["replay"] > 8 - WARM_UP
    else:
        assert recorder.calls == {"warm_up": WARM_UP, "record": 1, "replay": 8 - WARM_UP}
    assert torch.equal(weights(usual.algorithm.student), weights(graphed.algorithm.student))
    assert torch.allclose(
        weights(usual.algorithm.average.module),
        weights(graphed.algorithm.average.module),
        atol=1e-6,
    )
    assert torch.equal(usual.algorithm.method.pi_u, graphed.algorithm.method.pi_u)
    assert usual.step == graphed.step == 8
    for trainer in (usual, graphed):
        trainer.close()


def test_scalars_keep_their_digits_beside_views_in_bfloat16() -> None:
    seen: list[Tensor] = []

    class Algorithm:
        setup = SimpleNamespace(config=Config(name="x"))

        def step(self, batch: Batch, lr: Tensor, decay: Tensor, begun: Any) -> MethodOutput:
            seen.extend((lr, decay))
            return MethodOutput(*(torch.zeros(()) for _ in fields(MethodOutput)))

    algorithm: Any = Algorithm()
    views = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
    labels = torch.zeros(1, dtype=torch.int64)
    StepGraph(algorithm, RunAgain())(Batch(0, views, labels, labels), 0.03, 0.999)
    assert [value.item() for value in seen] == pytest.approx([0.03, 0.999], rel=1e-7)


GPU = Ranks(0, 0, 1, 1, torch.device("cuda", 0))


def test_no_pipeline_gets_the_stream_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a run builds: torch's streams are 32 of each priority, in turn."""
    taken = collections.Counter[int]()

    def stream(device: torch.device, priority: int = 0) -> tuple[int, int]:
        taken[priority] += 1
        return priority, taken[priority] % 32

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", tuple)
    own = vars(CudaRecorder(GPU.device))["_stream"]
    assert own not in [torch.cuda.Stream(GPU.device) for _ in range(100)]


PLAIN = {"distributed.engine": "plain"}


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        (PLAIN, GPU, None),
        (PLAIN, Ranks(0, 0, 1, 1, torch.device("cpu")), "needs a CUDA device"),
        (PLAIN, Ranks(0, 0, 2, 2, torch.device("cuda", 0)), "collectives of 2 ranks"),
        ({"distributed.engine": "deepspeed"}, GPU, r"set distributed\.engine=plain"),
        ({**PLAIN, "distributed.micro_batch": 4}, GPU, r"leave out distributed\.micro_batch"),
    ],
)
def test_what_cannot_be_captured_is_told(
    tiny: MakeConfig, changes: dict[str, Any], ranks: Ranks, reason: str | None
) -> None:
    found = why_not_captured(tiny(changes), ranks)
    if reason is None:
        assert found is None
    else:
        assert found is not None and re.search(reason, found)


def test_where_it_cannot_be_a_line_says_what_is_done(
    tiny: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, algorithm = Ranks(0, 0, 1, 1, torch.device("cpu")), cast(Step, None)
    assert build_step_graph(tiny(PLAIN), ranks, algorithm) is None and not caplog.messages
    asked = tiny({**PLAIN, "train.compile": "cuda-graphs"})
    assert build_step_graph(asked, ranks, algorithm) is None
    (line,) = caplog.messages
    assert "train.compile=default here: it needs a CUDA device" in line


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strong_forward", ["all", "confident"])
def test_captured_steps_train_as_eager_ones(
    tiny: MakeConfig, optimizer: str, strong_forward: str
) -> None:
    runs = []
    for graph in (False, True):
        config = tiny(
            {
                **PLAIN,
                "device": "cuda",
                "train.cudnn_benchmark": False,
                "train.tf32": False,
                "optim.name": optimizer,
                "train.weak_forward": "no_grad",
                "train.strong_forward": strong_forward,
                "method.threshold": 0.0,  # one number of images, so that it is replayed
            }
        )
        trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
        if graph:
            trainer.step_graph = StepGraph(
                trainer.algorithm, CudaRecorder(trainer.setup.ranks.device)
            )
        for _ in range(8):
            trainer.train_step()
        trainer.guard.settle()
        trainer.algorithm.method.update_priors()
        runs.append(
            (
                weights(trainer.algorithm.student),
                trainer.meter.sums.clone(),
                trainer.algorithm.method.pi_u,
            )
        )
        trainer.close()
    for eager, captured in zip(*runs, strict=True):
        assert torch.allclose(eager, captured, rtol=1e-3, atol=1e-5)
