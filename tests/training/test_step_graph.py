"""The step as one graph: static memory, scalars that change, and the same training."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.methods import MethodOutput
from simpro_fast.training.engine.compile import why_not_captured
from simpro_fast.training.step_graph import WARM_UP, CudaRecorder, StepGraph, build_step_graph
from simpro_fast.training.trainer import Trainer
from tests.training.test_trainer import synthetic

MakeConfig = Callable[..., Config]


class RunAgain:
    """A recorder for the CPU: a replay runs the function and fills the recorded results."""

    def __init__(self) -> None:
        self.calls = {"warm_up": 0, "record": 0, "replay": 0}

    def warm_up(self, function: Callable[[], MethodOutput]) -> MethodOutput:
        self.calls["warm_up"] += 1
        self._last = function()
        return self._last

    def record(self, function: Callable[[], MethodOutput]) -> MethodOutput:
        self.calls["record"] += 1  # recording does nothing yet, as a capture
        self._function = function
        self._result = MethodOutput(
            **{f.name: getattr(self._last, f.name).detach().clone() for f in fields(self._last)}
        )
        return self._result

    def forget(self) -> None:
        self.calls["forget"] = self.calls.get("forget", 0) + 1

    def replay(self) -> None:
        self.calls["replay"] += 1
        done = self._function()
        for field in fields(done):
            getattr(self._result, field.name).copy_(getattr(done, field.name).detach())


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])


@pytest.mark.parametrize(
    "changes",
    [{}, {"train.weak_forward": "no_grad", "optim.grad_clip": 1.0}, {"train.ema_warmup": True}],
    ids=["published", "two passes", "decay that changes"],
)
def test_replayed_steps_train_as_the_usual_ones(tiny: MakeConfig, changes: dict[str, Any]) -> None:
    config = tiny({"distributed.engine": "plain", "optim.warmup_steps": 4, **changes})
    usual, graphed = (
        Trainer(config, start_ranks(config), make_loader=synthetic(), write=False) for _ in range(2)
    )
    recorder = RunAgain()
    graphed.step_graph = StepGraph(graphed.algorithm.step, recorder)
    for step in range(8):
        usual.train_step()
        graphed.train_step()
        assert torch.allclose(usual.meter.sums, graphed.meter.sums, rtol=1e-6)
        if step == 5:
            usual.algorithm.method.update_priors()
            graphed.algorithm.method.update_priors()
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

    def learn(batch: Batch, lr: Tensor, decay: Tensor) -> MethodOutput:
        seen.extend((lr, decay))
        return MethodOutput(*(torch.zeros(()) for _ in fields(MethodOutput)))

    views = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
    labels = torch.zeros(1, dtype=torch.int64)
    StepGraph(learn, RunAgain())(Batch(0, views, labels, labels), 0.03, 0.999)
    assert [value.item() for value in seen] == pytest.approx([0.03, 0.999], rel=1e-7)


GPU = Ranks(0, 0, 1, 1, torch.device("cuda", 0))
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
    ranks = Ranks(0, 0, 1, 1, torch.device("cpu"))

    def learn(*_: Any) -> MethodOutput:
        raise AssertionError("it is not called")

    assert build_step_graph(tiny(PLAIN), ranks, learn) is None and not caplog.messages
    asked = tiny({**PLAIN, "train.compile": "cuda-graphs"})
    assert build_step_graph(asked, ranks, learn) is None
    (line,) = caplog.messages
    assert "train.compile=default here: it needs a CUDA device" in line


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_captured_steps_train_as_eager_ones(tiny: MakeConfig, optimizer: str) -> None:
    runs = []
    for graph in (False, True):
        config = tiny(
            {
                **PLAIN,
                "device": "cuda",
                "train.cudnn_benchmark": False,
                "train.tf32": False,
                "optim.name": optimizer,
            }
        )
        trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
        if graph:
            trainer.step_graph = StepGraph(trainer.learn, CudaRecorder(trainer.ranks.device))
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
