"""timm's networks: built by name for the image size, without randomness of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from simpro_fast.config import Config
from simpro_fast.config.schema import ModelConfig
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.models import build_model, head_of, load_pretrained, weights_file
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError

timm = pytest.importorskip("timm")
MakeConfig = Callable[..., Config]

# One of each kind, small; with the name of its head.
FAMILIES = {
    "convnext_atto": "head.fc",
    "densenet121": "classifier",
    "regnety_002": "head.fc",
    "resnet18": "fc",
    "swin_tiny_patch4_window7_224": "head.fc",
    "tf_efficientnet_lite0": "classifier",
    "vit_tiny_patch16_224": "head",
}


def build(name: str, *, num_classes: int = 5, size: int = 64, **keys) -> nn.Module:
    return build_model(ModelConfig(name=f"timm/{name}", **keys), num_classes, size)


@pytest.mark.parametrize("name", FAMILIES)
def test_trains_on_a_batch_of_two_and_draws_nothing(name: str) -> None:
    model = build(name)
    assert model.training
    assert head_of(model) is model.get_submodule(FAMILIES[name])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    logits = model(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 5)
    nn.functional.cross_entropy(logits, torch.tensor([0, 4])).backward()
    assert torch.equal(torch.get_rng_state(), before), "dropout masks would differ after a resume"
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


def test_noise_that_a_network_brings_is_off() -> None:
    model = build("vit_tiny_patch16_224")
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), model(x))


def test_initialisation_depends_on_the_seed_only() -> None:
    first, torch_state = build("resnet18").state_dict(), torch.get_rng_state()
    torch.manual_seed(9)
    again = build("resnet18").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    torch.set_rng_state(torch_state)


def test_batch_norm_momentum_is_set_and_activation_is_the_networks_own() -> None:
    norms = [m for m in build("resnet18", bn_momentum=0.02).modules() if hasattr(m, "momentum")]
    assert {m.momentum for m in norms} == {0.02}
    with pytest.raises(ConfigError, match=r"model\.activation=relu: timm/resnet18 has its"):
        build("resnet18", activation="relu")


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("inception_v3", 32, "cannot take images of 32 px"),
        ("resnet18", 4, "at least 8 px"),
        ("resnet19", 64, "did you mean timm/resnet18"),
        ("resnet18.nobody", 64, "no weights of that tag"),
        ("deit_tiny_distilled_patch16_224", 64, "does not end in one linear layer"),
    ],
)
def test_what_cannot_be_trained_is_one_line(name: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, size=size)
    assert "\n" not in str(caught.value)


def test_missing_timm_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"`pip install .*timm") as caught:
        build("resnet18")
    assert "\n" not in str(caught.value)


def test_weights_of_another_image_size_fit(tmp_path: Path) -> None:
    """Position embeddings are resampled as timm does it."""
    given = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5)
    save_file(given.state_dict(), tmp_path / "vit.safetensors")
    model = build("vit_tiny_patch16_224", size=96)
    report = load_pretrained(model, tmp_path / "vit.safetensors")
    assert report.matched == report.total
    assert model.pos_embed.shape[1] == 1 + 36
    assert torch.equal(model.blocks[3].attn.qkv.weight, given.blocks[3].attn.qkv.weight)


def hub(folder: Path, mean: float) -> None:
    """A repository as the hub's cache has it."""
    repository = folder / "hub" / "models--org--net"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    network = timm.create_model("resnet18", num_classes=7)
    save_file(network.state_dict(), snapshot / "model.safetensors")
    config = {"pretrained_cfg": {"mean": [mean] * 3, "std": [0.25] * 3, "interpolation": "bicubic"}}
    (snapshot / "config.json").write_text(json.dumps(config))


def test_weights_of_the_hub_come_from_its_cache_with_their_statistics(
    tiny: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub(tmp_path, 0.4)
    changes = {"model.name": "timm/resnet18", "model.weights": "hf-hub:org/net"}
    changes |= {"model.bn_momentum": None, "data.image_size": None}
    found = {}
    for name, more in {
        "weights": {},
        "given": {"data.mean": [0.1, 0.2, 0.3], "data.std": [1.0, 1.0, 1.0]},
        "filter": {"data.interpolation": "bilinear"},
    }.items():
        config = tiny({**changes, **more, "name": name})
        trainer = Trainer(config, start_ranks(config), write=False)
        trainer.close()
        assert trainer.algorithm.pretrained is not None
        assert trainer.algorithm.pretrained.matched == 120
        setup = trainer.setup
        dataset = setup.dataset
        found[name] = (dataset.mean[0], setup.normalised_by)
        found[name] += (dataset.interpolation, setup.interpolated_by)
    by_weights, filtered = (f"{what} of the weights of timm/resnet18" for what in ("those", "that"))
    assert found == {
        "weights": (0.4, by_weights, "bicubic", filtered),
        "given": (0.1, "data.mean, data.std", "bicubic", filtered),
        "filter": (0.4, by_weights, "bilinear", "data.interpolation"),
    }
    with pytest.raises(UserError, match=r"hf-hub:org/none is not in the local cache .*download"):
        weights_file(ModelConfig(name="timm/resnet18", weights=Path("hf-hub:org/none")))


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_a_frozen_backbone_stays_as_it_is(tiny: MakeConfig, engine: str) -> None:
    """Running statistics included, and it is not trained in evaluation mode by half."""
    config = tiny({"optim.backbone_lr_scale": 0.0, "distributed.engine": engine})
    trainer = Trainer(config, start_ranks(config), write=False)
    before = {k: v.clone() for k, v in trainer.algorithm.student.state_dict().items()}
    for _ in range(3):
        trainer.train_step()
    student = trainer.algorithm.student
    moved = {k for k, v in student.state_dict().items() if not torch.equal(v, before[k])}
    trainer.close()
    assert moved == {"head.weight", "head.bias"}
    assert head_of(student).training and not student.get_submodule("features").training
