"""Gradient accumulation: the same step as one big batch; what the ranks exchange for a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpro_fast.config import Config, parse_config
from simpro_fast.data.batch import Batch, BatchLayout
from simpro_fast.data.loader import build_loader
from simpro_fast.distributed.environment import check_launch
from simpro_fast.models import build_model
from simpro_fast.training import trainer
from simpro_fast.training.engine.gradient_sync import GradientAverage
from simpro_fast.utils.errors import ConfigError
from tests.distributed.gloo_ranks import run_ranks
from tests.distributed.rank_runs import dump, mean_losses, on_ranks, start, train
from tests.equality import assert_close

MakeConfig = Callable[..., Config]


def _group_norm(module: nn.Module) -> nn.Module:
    """The network with a norm that looks at one image at a time."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            norm = nn.GroupNorm(4, child.num_features)
            setattr(module, name, nn.Sequential(norm, nn.LeakyReLU(0.1)))
        else:
            _group_norm(child)
    return module


def _coarse_gradients(module: nn.Module) -> nn.Module:
    """The network with gradients in steps of 2^-16, so that float32 sums of them are exact."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: (gradient * 2**16).round() / 2**16)
    return module


def _train_changed(
    rank: int, world_size: int, change: Callable[[nn.Module], nn.Module], *args: Any
) -> dict[str, Any]:
    def build(*arguments: Any, **named: Any) -> nn.Module:
        return change(build_model(*arguments, **named))

    with mock.patch("simpro_fast.training.setup.build_model", build):
        return train(rank, world_size, *args)


def test_a_step_in_parts_is_the_step_of_the_whole_batch(tiny: MakeConfig) -> None:
    """float64, no batch norm: weights, momentum, average, counts, priors, losses of 6 steps."""
    changes = {"train.precision": "fp64", "train.ema_warmup": True, "optim.grad_clip": 1.0}
    whole = on_ranks(1, _train_changed, _group_norm, dump(tiny(changes)), 6)[0]
    for engine, world_size, micro in (("plain", 1, 2), ("plain", 2, 1), ("deepspeed", 2, 2)):
        split = {**changes, "distributed.engine": engine, "distributed.micro_batch": micro}
        parts = on_ranks(world_size, _train_changed, _group_norm, dump(tiny(split)), 6)
        assert_close(mean_losses(parts), whole["losses"], 1e-12)
        for key in ("model", "average", "optimizer", "priors"):
            assert_close(parts[0][key], whole[key], 1e-12)
        # Counts and the meter's sums: of the losses each rank has its own, so their mean.
        for name, wanted in whole["per_rank"].items():
            sums = parts[0]["per_rank"][name].sum(0)
            if name == "meter/sums":
                sums[:4] /= world_size
                sums, wanted = sums[:6], wanted[:, :6]  # then the steps, which each rank counts
            assert_close(sums, wanted[0], 1e-12)


def test_stages_agree_with_accumulation(tiny: MakeConfig) -> None:
    """ZeRO 0, 1, 2 and the plain engine, with batch norm over micro-batches: every bit.

    ZeRO has no float64, and its stage 2 adds up ranks first and micro-batches then; the others the
    other way round. So the gradients are such that their order does not matter.
    """
    runs = []
    for engine, stage in (("plain", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2)):
        distributed = {"distributed.engine": engine, "distributed.zero_stage": stage}
        tree = dump(tiny({"distributed.micro_batch": 2, **distributed}))
        runs.append(on_ranks(2, _train_changed, _coarse_gradients, tree, 4)[0])
    # In the middle of everything a checkpoint: the sharded slots come back with accumulation too.
    for _ in range(2):
        broken = on_ranks(2, _train_changed, _coarse_gradients, tree, 2, build_loader, True)[0]
    assert broken["start"] == 2
    broken["losses"] = torch.cat([runs[0]["losses"][:2], broken["losses"]])
    for run in (*runs[1:], broken):
        for key in ("losses", "model", "average", "optimizer"):
            assert_close(run[key], runs[0][key], 0.0)


def _collectives(rank: int, world_size: int, tree: dict[str, Any]) -> list[list[tuple[int, str]]]:
    """Sizes and types of all sums over ranks, of one step and of the end of a period."""
    config = parse_config(tree)
    run = trainer.Trainer(config, start(config, rank, world_size), write=False)
    found: list[tuple[int, str]] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found.append((tensor.numel(), str(tensor.dtype)))
        return all_reduce(tensor, *args, **options)

    phases = []
    with mock.patch.object(dist, "all_reduce", counted):
        for phase in (run.train_step, run.algorithm.method.update_priors):
            phase()
            phases.append(sorted(found))
            found.clear()
    run.close()
    return phases


def test_collectives_of_a_step_and_of_a_period(tiny: MakeConfig) -> None:
    """One for the gradients, one for the flags, one for the buffers; 4 K float64 per period."""
    for engine in ("plain", "deepspeed"):
        changes = {"distributed.engine": engine, "distributed.sync_bn": "average_buffers"}
        for micro in (None, 1):
            tree = dump(tiny({**changes, "distributed.micro_batch": micro}))
            for step, period in run_ranks(_collectives, tree):
                kinds = Counter(kind for _, kind in step)
                assert kinds == {"torch.float32": 2, "torch.float64": 1}, (engine, micro)
                assert period == [(40, "torch.float64")]


def _average(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    unused = nn.Linear(1, 1)
    average = GradientAverage([*unused.parameters(), *net.parameters()], world_size, 12)
    inputs = torch.arange(24.0).view(2, 4, 3)[rank] / 10
    sent = []
    net[0].weight.register_hook(lambda _: sent.append(len(average._sent)))
    for last in (False, True):
        if last:
            average.begin()
        net(inputs).square().mean().backward()
    average.finish()
    return {
        "sent": sent,  # buckets on their way when the first layer's gradient comes
        "gradients": [p.grad for p in net.parameters()],
        "unused": unused.weight.grad,
    }


def test_gradients_travel_while_backward_goes_on() -> None:
    """Buckets of at least 12 elements: [last layer], [first layer], [unused]."""
    ranks = run_ranks(_average)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    inputs = torch.arange(24.0).view(2, 4, 3) / 10
    (2 * net(inputs).square().mean()).backward()
    for result in ranks:
        for found, parameter in zip(result["gradients"], net.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)
        assert result["unused"] is None
        assert result["sent"] == [0, 1]


def _differences(rank: int, world_size: int) -> list[float]:
    """How far the average of the same gradients is from the first time, in later steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 10))
    average = GradientAverage(net.parameters(), world_size)
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(rank))
    found = []
    for _ in range(3):
        net.zero_grad()
        average.begin()
        net(inputs).square().mean().backward()
        average.finish()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    return [float((later - found[0]).abs().max()) for later in found[1:]]


def test_the_first_step_adds_up_in_the_order_of_later_ones() -> None:
    """So that the first step after a resume is the one of the unbroken run, with many ranks too."""
    assert run_ranks(_differences, world_size=4) == [[0.0, 0.0]] * 4


def test_micro_batches_keep_the_order_of_views() -> None:
    shapes = BatchLayout(labeled=4, unlabeled=8, labeled_views=2, strong_views=2)
    kinds = {"labeled": (4, 2), "unlabeled": (8, 3)}
    names = [
        f"{k}{i} view{v}" for k, (n, views) in kinds.items() for v in range(views) for i in range(n)
    ]
    batch = Batch(0, torch.arange(len(names)).view(-1, 1, 1, 1), torch.arange(4), torch.arange(8))
    parts = list(batch.micro_batches(shapes, 2))
    assert [names[n] for n in parts[1].views.flatten().tolist()] == [
        f"{k}{i} view{v}"
        for k, (n, views) in kinds.items()
        for v in range(views)
        for i in range(n // 2, n)
    ]
    assert torch.equal(torch.cat([p.targets for p in parts]), batch.targets)
    assert torch.equal(torch.cat([p.truth for p in parts]), batch.truth)
    assert next(batch.micro_batches(shapes, 1)) is batch


def test_micro_batch_must_divide(tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"micro_batch=3 does not divide the 4 .* 2 or 4"):
        check_launch(tiny({"distributed.micro_batch": 3}))
    check_launch(tiny({"distributed.micro_batch": 2}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed.zero_stage": 3}, "distributed.zero_stage=3: "),
        ({"distributed.offload": False}, "unknown key 'distributed.offload'"),
        (
            {
                "train.precision": "fp64",
                "distributed.engine": "deepspeed",
                "distributed.zero_stage": 1,
            },
            "fp64 needs distributed.zero_stage=0: DeepSpeed keeps float32 copies",
        ),
        ({"train.precision": "fp64", "method.impl": "triton"}, "Triton kernels compute in float32"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    tiny: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(changes)
