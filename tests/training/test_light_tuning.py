"""A pretrained transformer tuned lightly: LoRA, and rates that fall from the head down."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpro_fast import load_model
from simpro_fast.config import Config
from simpro_fast.config.schema import ModelConfig
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.models import build_model, load_pretrained
from simpro_fast.models.lora import give_lora, lora_layers, merge
from simpro_fast.run.checkpoint import read_checkpoint
from simpro_fast.training.engine.optim import build_optimizer
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError
from tests.distributed.outcomes import outcome
from tests.equality import assert_bit_equal, assert_close
from tests.training.test_method_protocol import interrupted
from tests.training.test_trainer import train

timm = pytest.importorskip("timm")
MakeConfig = Callable[..., Config]
VIT = "timm/test_vit"
PLAIN = {"model.name": VIT, "model.bn_momentum": None}


def vit() -> nn.Module:
    return build_model(ModelConfig(name=VIT), 10, 16, seed=3)


@pytest.fixture
def lora(tiny: MakeConfig, tmp_path: Path) -> MakeConfig:
    """A factory like `tiny` of runs that tune a small transformer by LoRA."""
    save_file(vit().state_dict(), tmp_path / "vit.safetensors")
    weights = str(tmp_path / "vit.safetensors")

    def make(changes: dict[str, Any] | None = None) -> Config:
        return tiny({**PLAIN, "model.weights": weights, "model.lora_rank": 2, **(changes or {})})

    return make


def state_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


APART = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True}


@pytest.mark.parametrize(
    ("kind", "parts", "layers"),
    [("VisionTransformer", {}, 4), ("Beit", {}, 4), ("Eva", APART, 7)],
    ids=["vit", "beit", "eva"],
)
def test_first_the_network_itself_and_merged_what_was_trained(
    kind: str, parts: dict[str, Any], layers: int
) -> None:
    """Also where attention applies the weight of its layer itself, as in BEiT."""
    shape = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    plain = getattr(timm.models, kind)(**shape, **parts).eval()
    nn.init.normal_(plain.head.weight)
    network = copy.deepcopy(plain)
    give_lora(network, kind, 3, seed=1)
    assert len(list(lora_layers(network))) == layers * len(network.blocks)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(network(images), plain(images), 0.0)
    network(images).square().sum().backward()
    with torch.no_grad():
        for _, layer in lora_layers(network):
            assert layer.b.grad is not None and layer.b.grad.any()
            layer.b.normal_(std=0.2)
        trained = network(images)
        assert (trained - plain(images)).abs().max() > 0.01
        merge(network)
        assert_close(network(images), trained, 1e-4)
    assert network.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.backbone_lr_scale": 0.0, "optim.name": "adamw", "method.name": "abc"},
        {"distributed.engine": "deepspeed"},
        {"distributed.engine": "deepspeed", "distributed.zero_stage": 1},
    ],
    ids=["plain", "adamw", "deepspeed", "zero"],
)
def test_only_head_and_adapters_learn(lora: MakeConfig, changes: dict[str, Any]) -> None:
    config = lora(changes)
    trainer = Trainer(config, start_ranks(config), write=False)
    before = state_of(trainer.algorithm.student)
    for _ in range(3):
        trainer.train_step()
    trainer.close()
    student = trainer.algorithm.student
    moved = {k for k, v in student.state_dict().items() if not torch.equal(v, before[k])}
    adapters = {f"{path}.{name}" for path, _ in lora_layers(student) for name in "ab"}
    assert moved == adapters | {"head.weight", "head.bias"}
    assert not student.blocks.training


def test_adapters_learn_at_the_rate_of_the_head(lora: MakeConfig) -> None:
    found = []
    for scale in (1.0, 0.01):
        config = lora({"optim.backbone_lr_scale": scale})
        trainer = Trainer(config, start_ranks(config), write=False)
        trainer.train_step()
        trainer.close()
        found.append(state_of(trainer.algorithm.student))
    assert_bit_equal(*found)


def test_what_is_exported_is_the_plain_network(lora: MakeConfig) -> None:
    config = lora({"train.steps": 6})
    trainer = Trainer(config, start_ranks(config))
    trainer.fit()
    trainer.close()
    average = trainer.algorithm.average.module
    assert any(layer.b.any() for _, layer in lora_layers(average))
    dataset = load_dataset(config.data)
    exported = load_model(config.run_dir, "cpu")
    seen: list[Tensor] = []
    exported.module.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    logits = exported.logits(dataset.images[:20])
    with torch.no_grad():
        assert_close(logits, average(seen[0]), 1e-4)
    assert json.loads((config.run_dir / "model.json").read_text())["model"]["lora_rank"] == 0
    weights = config.run_dir / "model.safetensors"
    assert load_file(weights).keys() == vit().state_dict().keys()
    report = load_pretrained(vit(), weights)
    assert report.matched == report.total


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_an_interrupted_run_equals_the_unbroken_one(lora: MakeConfig, engine: str) -> None:
    unbroken, broken = (lora({"name": n, "distributed.engine": engine}) for n in ("whole", "parts"))
    train(unbroken)
    interrupted(broken, 7)
    outcome(broken).assert_equal(outcome(unbroken))


def test_checkpoints_leave_the_frozen_backbone_to_its_file(
    lora: MakeConfig, tmp_path: Path
) -> None:
    """Also what is missing there is kept; with another place of the file the run goes on."""
    weights = tmp_path / "vit.safetensors"
    state = load_file(weights)
    del state["blocks.0.attn.qkv.bias"]
    save_file(state, weights)
    config = lora({"checkpoint.every": 8})
    trainer = Trainer(config, start_ranks(config))
    for _ in range(8):
        trainer.train_step()
    trainer.save()
    before = trainer.algorithm
    student, average = state_of(before.student), state_of(before.average.module)
    trainer.close()
    (path,) = config.run_dir.glob("checkpoints/*.pt")
    adapters = {f"{p}.{name}" for p, _ in lora_layers(before.student) for name in "ab"}
    kept = adapters | {"head.weight", "head.bias", "blocks.0.attn.qkv.base.bias"}
    tensors = read_checkpoint(path)["tensors"]
    for part in ("model", "average"):
        assert {n.removeprefix(f"{part}/") for n in tensors if n.startswith(f"{part}/")} == kept
    weights.rename(tmp_path / "moved.safetensors")
    with pytest.raises(UserError, match=r"vit\.safetensors is gone, and .*\.pt leaves the frozen"):
        Trainer(config, start_ranks(config))
    moved = lora({"checkpoint.every": 8, "model.weights": str(tmp_path / "moved.safetensors")})
    again = Trainer(moved, start_ranks(moved))
    again.close()
    assert_bit_equal(state_of(again.algorithm.student), student)
    assert_bit_equal(state_of(again.algorithm.average.module), average)


def test_what_lora_cannot_tune_is_one_line(tiny: MakeConfig) -> None:
    config = tiny({"model.lora_rank": 4})
    with pytest.raises(ConfigError, match=r"lora_rank=4: model\.name=small_cnn .*lora_rank=0$"):
        Trainer(config, start_ranks(config), write=False)
    with pytest.raises(ConfigError, match=r"lora_rank=4 .*train\.features"):
        tiny({"model.lora_rank": 4, "train.features": "auto"})


def test_rates_fall_from_the_head_down(tiny: MakeConfig) -> None:
    """In groups with and without weight decay as ever, times the scale of the backbone."""
    config = tiny({**PLAIN, "optim.layer_decay": 0.5, "optim.backbone_lr_scale": 0.4})
    network = vit()
    found = {
        id(parameter): (group["lr_scale"], group["weight_decay"])
        for group in build_optimizer(config.optim, network).param_groups
        for parameter in group["params"]
    }
    decay, blocks = config.optim.weight_decay, len(network.blocks)
    below_head = {
        "pos_embed": (blocks + 1, decay),
        "patch_embed.proj.weight": (blocks + 1, decay),
        "blocks.0.attn.qkv.weight": (blocks, decay),
        "blocks.0.norm1.weight": (blocks, 0.0),
        "blocks.3.mlp.fc2.bias": (blocks - 3, 0.0),
        f"blocks.{blocks - 1}.attn.proj.weight": (1, decay),
        "norm.bias": (1, 0.0),
    }
    parameters = dict(network.named_parameters())
    for name, (layers, weight_decay) in below_head.items():
        assert found[id(parameters[name])] == (0.4 * 0.5**layers, weight_decay), name
    assert found[id(network.head.weight)] == (1.0, decay)
    assert len(found) == len(parameters)


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_a_run_with_layer_decay_resumes(tiny: MakeConfig, engine: str) -> None:
    changes = {**PLAIN, "optim.layer_decay": 0.7, "distributed.engine": engine, "train.steps": 8}
    unbroken, broken = (tiny({**changes, "name": name}) for name in ("whole", "parts"))
    train(unbroken)
    interrupted(broken, 3)
    outcome(broken).assert_equal(outcome(unbroken))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"layer_decay=0\.7: a SmallCNN .* optim\.layer_decay=1$"),
        ({"model.lora_rank": 2}, r"layer_decay=0\.7 .*model\.lora_rank"),
        ({"optim.backbone_lr_scale": 0.0}, r"layer_decay=0\.7 .*backbone_lr_scale=0"),
    ],
)
def test_what_has_no_layers_that_learn_is_refused(
    tiny: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config = tiny({"optim.layer_decay": 0.7, **changes})
        Trainer(config, start_ranks(config), write=False)
