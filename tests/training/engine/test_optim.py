import math

import pytest
import torch
from torch import nn

from simpro_fast.config import Config
from simpro_fast.config.schema import ModelConfig, OptimConfig
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.models import (
    build_model,
    convert_sync_batch_norm,
    freeze_backbone,
    head_of,
)
from simpro_fast.models.head import adopt_parameters
from simpro_fast.training.engine.base import Engine
from simpro_fast.training.engine.optim import (
    build_optimizer,
    learning_rate,
    param_groups,
    set_learning_rate,
)
from simpro_fast.training.setup import build_engine
from simpro_fast.utils.errors import ConfigError, UserError


class Odd(nn.Module):
    """Norms without a telling name, a parameter shared, one frozen, an attention bias."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.layer_norm = nn.LayerNorm(4)
        self.group = nn.GroupNorm(2, 4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.head = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def names(model: nn.Module, group: dict) -> set[str]:
    return {n for n, p in model.named_parameters() if any(p is q for q in group["params"])}


def test_groups_go_by_module_type():
    model = Odd()
    decayed, undecayed = param_groups(model, 0.1)
    assert names(model, decayed) == {
        "shortcut.0.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "head.weight",
    }
    assert names(model, undecayed) == {
        "shortcut.1.weight",
        "shortcut.1.bias",
        "layer_norm.weight",
        "layer_norm.bias",
        "group.weight",
        "group.bias",
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "head.bias",
    }
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) == 4


@pytest.mark.parametrize("convert", [lambda m: m, convert_sync_batch_norm])
def test_every_trained_parameter_is_in_one_group(convert):
    model = convert(build_model(ModelConfig(name="wrn_10_2"), 10, 32))
    groups = param_groups(model, 5e-4)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    assert all(p.ndim > 1 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])


def test_the_shortcuts_norm_weights_are_decayed_as_in_the_released_code():
    model = build_model(ModelConfig(name="resnet50_3x3"), 10, 32)
    usual, released = (
        names(model, param_groups(model, 0.1, decay_shortcut_norm=switch)[0])
        for switch in (False, True)
    )
    assert released - usual == {f"layer{i}.0.downsample.1.weight" for i in range(1, 5)}
    assert usual < released


def test_no_empty_group():
    assert [g["weight_decay"] for g in param_groups(nn.Linear(2, 2, bias=False), 0.1)] == [0.1]
    assert [g["weight_decay"] for g in param_groups(nn.BatchNorm1d(2), 0.1)] == [0.0]


def test_backbone_and_head_have_groups_of_their_own():
    model = build_model(ModelConfig(name="small_cnn"), 3, 16)
    groups = param_groups(model, 0.1, 0.2)
    found = [(len(g["params"]), g["weight_decay"], g["lr_scale"]) for g in groups]
    assert found == [(6, 0.1, 0.2), (12, 0.0, 0.2), (1, 0.1, 1.0), (1, 0.0, 1.0)]
    assert names(model, groups[2]) | names(model, groups[3]) == {"head.weight", "head.bias"}
    set_learning_rate(groups, 0.5)
    assert [g["lr"] for g in groups] == [0.1, 0.1, 0.5, 0.5]
    # A scale of 1 leaves the two groups that have always been, in one fused update each.
    assert [g["lr_scale"] for g in param_groups(model, 0.1, 1.0)] == [1.0, 1.0]


def test_head_of_is_the_last_layer_also_after_conversion():
    for name, expected in (("small_cnn", "head"), ("wrn_10_1", "head"), ("resnet50", "fc")):
        model = build_model(ModelConfig(name=name), 3, 32)
        for converted in (model, convert_sync_batch_norm(model)):
            assert head_of(converted) is converted.get_submodule(expected)


ENGINES = [("plain", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2)]
RATES = (0.1, 0.05, 0.02)


def start_engine(tiny, engine: str, stage: int, scale: float) -> Engine:
    config: Config = tiny(
        {
            "distributed.engine": engine,
            "distributed.zero_stage": stage,
            "optim.backbone_lr_scale": scale,
            "optim.weight_decay": 0.01,
        }
    )
    return build_engine(config, build_model(config.model, 3, 16), start_ranks(config))


def loss_of(forward, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(6, 3, 16, 16, generator=generator)
    output = forward(images)
    logits = output[0] if isinstance(output, tuple) else output
    return (logits * torch.randn(6, 3, generator=generator)).mean()


def take_steps(engine: Engine, steps: range) -> None:
    for step in steps:
        engine.backward(loss_of(engine.forward, step))
        engine.step(RATES[step])


def by_hand(scale: float) -> nn.Module:
    """Nesterov momentum with decay, written out: p -= lr * scale * (g + 0.9 v), v = 0.9 v + g."""
    model = build_model(ModelConfig(name="small_cnn", bn_momentum=0.1), 3, 16)
    model.get_submodule("features").train(scale > 0)
    parameters = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step, lr in enumerate(RATES):
        gradients = torch.autograd.grad(loss_of(model, step), list(parameters.values()))
        for (name, p), g in zip(parameters.items(), gradients, strict=True):
            g = g + 0.01 * p.detach() if p.ndim > 1 else g
            velocity[name] = 0.9 * velocity[name] + g
            rate = lr if name.startswith("head.") else lr * scale
            p.data -= rate * (g + 0.9 * velocity[name])
    return model


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
@pytest.mark.parametrize("scale", [0.1, 0.0])
def test_engines_scale_the_rate_of_the_backbone(tiny, engine, stage, scale):
    """Also over a checkpoint, whose slots go by name."""
    expected = by_hand(scale).state_dict()
    first = start_engine(tiny, engine, stage, scale)
    take_steps(first, range(2))
    saved = first.save()
    kept = {k: v.clone() for k, v in saved["model"].items()}
    slots = {k: {s: v.clone() for s, v in d.items()} for k, d in saved["optimizer"].items()}
    trained = {n for n, p in first.module.named_parameters() if p.requires_grad}
    assert set(slots) == trained and (trained == {"head.weight", "head.bias"}) == (scale == 0)
    second = start_engine(tiny, engine, stage, scale)
    second.load({"model": kept, "optimizer": slots})
    for run in (first, second):
        take_steps(run, range(2, 3))
        found = run.module.state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=2e-6, rtol=2e-5, msg=name)
    fresh = build_model(ModelConfig(name="small_cnn"), 3, 16).state_dict()
    moved = {name for name, value in found.items() if not torch.equal(value, fresh[name])}
    backbone = {name for name in moved if name.startswith("features.")}
    assert (backbone == set()) == (scale == 0), "a frozen backbone does not move at all"


def test_frozen_backbone_has_neither_decay_nor_state_under_adamw():
    model = build_model(ModelConfig(name="small_cnn"), 3, 16)
    freeze_backbone(model)
    optimizer = build_optimizer(OptimConfig(name="adamw", lr=0.1, weight_decay=0.5), model)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_of(model, 0).backward()
    set_learning_rate(optimizer.param_groups, 0.1)
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), start[n])}
    assert changed == {"head.weight", "head.bias"} and len(optimizer.state) == 2


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_step_follows_the_layout_of_the_weights(name):
    """A fused step pairs elements by address: channels_last weights need such gradients."""
    optim = OptimConfig(name=name, lr=0.1)
    weights, found = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)), []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(3, 4, 3, bias=False)
        model.weight.data = weights.clone().contiguous(memory_format=layout)
        optimizer = build_optimizer(optim, model)
        for _ in range(3):
            model(torch.ones(1, 3, 5, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    model.weight.grad = weights.clone()
    with pytest.raises(RuntimeError, match=r"strides \(27, 9, 3, 1\)"):
        build_optimizer(optim, model).step()
    pointwise = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
    pointwise.weight.grad = torch.ones(4, 3, 1, 1)
    assert pointwise.weight.grad.stride() != pointwise.weight.stride()  # of one element each
    build_optimizer(optim, pointwise).step()


def test_optimizer_settings():
    model = nn.Linear(2, 1)
    adamw = build_optimizer(OptimConfig(name="adamw", lr=0.1, momentum=0.8), model)
    assert isinstance(adamw, torch.optim.AdamW) and adamw.defaults["betas"] == (0.8, 0.999)
    plain = build_optimizer(OptimConfig(momentum=0.0), model)
    assert isinstance(plain, torch.optim.SGD) and not plain.defaults["nesterov"]
    assert not build_optimizer(OptimConfig(nesterov=False), model).defaults["nesterov"]


def test_published_schedule():
    optim, total = OptimConfig(lr=0.17), 43_000
    for step in (0, 1, 12_345, 42_999):
        expected = 0.17 * math.cos(7 * math.pi * step / (16 * total))
        assert learning_rate(optim, step, total) == pytest.approx(expected, rel=1e-15)
    assert learning_rate(optim, total, total) == pytest.approx(0.195 * 0.17, rel=1e-3)
    assert learning_rate(optim, 2 * total, total) == 0


def test_other_schedules():
    cosine = OptimConfig(lr=2.0, schedule="cosine")
    assert [learning_rate(cosine, s, 4) for s in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])
    assert learning_rate(cosine, 5, 4) == 0
    assert learning_rate(OptimConfig(lr=2.0, schedule="constant"), 3, 4) == 2.0


def test_warmup_is_linear_and_the_schedule_covers_the_rest():
    optim = OptimConfig(lr=1.0, schedule="cosine", warmup_steps=4)
    rates = [learning_rate(optim, step, 12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[8] == pytest.approx(0.5) and rates[12] == pytest.approx(0.0)
    with pytest.raises(ConfigError, match=r"warmup_steps=4 must be smaller than train\.steps=4"):
        learning_rate(optim, 0, 4)


class Learned(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(shape))
        self.projection = nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0])
def test_parameters_of_a_method_learn_at_the_rate_of_the_head(scale):
    model, method = build_model(ModelConfig(name="small_cnn"), 3, 8), Learned(1)
    head = head_of(model)
    adopt_parameters(model, method)
    assert head_of(model) is head
    optimizer = build_optimizer(OptimConfig(backbone_lr_scale=scale, weight_decay=0.1), model)
    found = {
        name: (group["lr_scale"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in names(model, group)
    }
    own = {name.removeprefix("method_parameters."): v for name, v in found.items() if "/" in name}
    assert own == {"projection/weight": (1.0, 0.1), "projection/bias": (1.0, 0.0)}
    assert found["method_parameters.temperature"] == (1.0, 0.0)
    assert "method_parameters.frozen" not in found
    # The same tensors: what the optimizer moves, the method computes with.
    assert model.method_parameters["temperature"] is method.temperature


def test_a_parameter_of_a_method_has_a_dimension():
    model = build_model(ModelConfig(name="small_cnn"), 3, 8)
    with pytest.raises(UserError, match=r"Learned: its parameter temperature .*\[1\]"):
        adopt_parameters(model, Learned())
