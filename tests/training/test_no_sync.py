"""A step never makes the host wait for the device, and a bad step is noticed all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.run.checkpoint import list_checkpoints
from simpro_fast.training.step_guard import NonFiniteLossError, StepGuard
from simpro_fast.training.trainer import Trainer
from tests.training.test_trainer import synthetic

MakeConfig = Callable[..., Config]
# Operators that give the host a value or a shape made of values.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")
READ = "aten._local_scalar_dense.default"
CONFIDENT = {"train.weak_forward": "no_grad", "train.strong_forward": "confident"}


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({}, 1),
        ({"distributed.engine": "deepspeed"}, 1),
        ({"train.precision": "bf16", "optim.grad_clip": 1.0, "method.name": "fixmatch"}, 1),
        ({"distributed.micro_batch": 4, "train.weak_forward": "no_grad"}, 1),
        (CONFIDENT, 2),
    ],
    ids=["plain", "deepspeed", "bf16-clipped-fixmatch", "micro-batches", "confident"],
)
def test_step_reads_one_flag(tiny: MakeConfig, changes: dict[str, Any], reads: int) -> None:
    """The guard's, which on CUDA is an asynchronous copy; confident strong views add their number.

    The progress line reads what it shows, when it is due.
    """
    config = tiny(changes)
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
    trainer.train_step()
    with CountReads() as counter:
        trainer.train_step()
    assert counter.found == [READ] * reads
    trainer.progress.due = lambda: True  # type: ignore[method-assign]
    with CountReads() as counter:
        trainer.train_step()
    trainer.close()
    assert len(counter.found) > reads


class Event:
    """Stands in for `torch.cuda.Event`: how often the host asked to wait."""

    waits = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.waits += 1


def late(guard: StepGuard) -> StepGuard:
    """The guard as it is on CUDA, on CPU tensors: answers are obeyed one step later."""
    vars(guard).update(_cuda=True, _host=torch.zeros(2), _copied=Event())
    return guard


@pytest.mark.parametrize(("poisoned", "noticed_after"), [(6, 7), (9, 10), (7, 8)])
def test_late_answer_comes_before_anything_is_made_of_the_step(
    tiny: MakeConfig, poisoned: int, noticed_after: int
) -> None:
    """In the next step; at once where a period (9) or a checkpoint (7) would use the weights."""
    config = tiny()  # period 5, checkpoint every 4
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(poison_step=poisoned))
    late(trainer.guard)
    with pytest.raises(NonFiniteLossError, match=f"step {poisoned} is not finite"):
        trainer.fit()
    trainer.close()
    assert trainer.step == noticed_after
    assert torch.isfinite(trainer.algorithm.method.pi_u).all()
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5]
    newest = list_checkpoints(config.run_dir / "checkpoints")[0]
    assert newest.name == f"step_{4 if poisoned < 8 else 8:09d}.pt"


def test_late_answer_is_waited_for_in_the_next_step() -> None:
    """So the device has a whole step to do while the host waits; ranks agree to stop likewise."""
    asked = SimpleNamespace(stop=False)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"), sum=lambda values: values)
    guard = late(StepGuard(ranks, lambda: asked.stop))
    event = vars(guard)["_copied"]
    guard.watch(torch.tensor(1.0), 0)
    assert event.waits == 0
    asked.stop = True
    guard.watch(torch.tensor(1.0), 1)
    assert event.waits == 1 and not guard.stop_agreed
    guard.settle()
    guard.settle()
    assert event.waits == 2 and guard.stop_agreed
    guard.watch(torch.tensor(torch.nan), 2)
    with pytest.raises(NonFiniteLossError, match="step 2 "):
        guard.watch(torch.tensor(1.0), 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [{"train.precision": "bf16"}, {"train.weak_forward": "no_grad"}, {"optim.name": "adamw"}],
    ids=["bf16", "no_grad", "adamw"],
)
def test_step_on_cuda_does_not_synchronise(tiny: MakeConfig, changes: dict[str, Any]) -> None:
    config = tiny({"device": "cuda", "optim.grad_clip": 1.0, **changes})
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
    for _ in range(3):  # Kernels are compiled and memory is allocated, which may wait.
        trainer.train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.guard.settle()
    assert trainer.step == 6
    trainer.close()
