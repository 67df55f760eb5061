"""torchvision's classifiers: built by name for the image size, without randomness of their own."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from simpro_fast.config.schema import ModelConfig
from simpro_fast.models import build_model, head_of
from simpro_fast.models.torchvision_nets import torchvision_names
from simpro_fast.utils.errors import ConfigError, UserError

models = pytest.importorskip("torchvision").models

# One of each family, small; with the name of its head.
FAMILIES = {
    "alexnet": "classifier.6",
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "mnasnet0_5": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
    "regnet_y_400mf": "fc",
    "resnet18": "fc",
    "resnext50_32x4d": "fc",
    "shufflenet_v2_x0_5": "fc",
    "squeezenet1_1": "classifier.1",
    "swin_t": "head",
    "swin_v2_t": "head",
    "vit_b_32": "heads.head",
}


def build(name: str, *, num_classes: int = 5, size: int = 64, **keys) -> nn.Module:
    return build_model(ModelConfig(name=f"torchvision/{name}", **keys), num_classes, size)


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


def test_every_family_is_tested_or_known() -> None:
    # MaxViT takes 224 px only, VGG has 130 million weights, wide ResNets are ResNets.
    left_out = {"maxvit_t", "vgg", "wide_resnet"}
    stems = {name.split("_")[0].rstrip("0123456789") for name in [*FAMILIES, *left_out]}
    found = {name.split("_")[0].rstrip("0123456789") for name in torchvision_names()}
    assert found == stems


def test_is_torchvisions_own_network() -> None:
    reference = models.resnet18(num_classes=5).eval()
    model = build("resnet18").eval()
    model.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), reference(x))


def test_initialisation_depends_on_the_seed_only() -> None:
    first, torch_state = build("resnet18").state_dict(), torch.get_rng_state()
    torch.manual_seed(9)
    again = build("resnet18").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    torch.set_rng_state(torch_state)


def test_batch_norm_momentum_is_set_and_activation_is_the_networks_own() -> None:
    norms = [m for m in build("resnet18", bn_momentum=0.02).modules() if hasattr(m, "momentum")]
    assert {m.momentum for m in norms} == {0.02}
    with pytest.raises(ConfigError, match=r"model\.activation=relu: torchvision/resnet18 has its"):
        build("resnet18", activation="relu")


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("vit_b_16", 33, r"patches of 16 px, so data\.image_size=33 .* nearest: 32 or 48"),
        ("vit_b_32", 20, r"nearest: 32$"),
        ("alexnet", 32, r"cannot take images of 32 px .*another data\.image_size"),
        ("maxvit_t", 64, r"cannot take images of 64 px .*another data\.image_size"),
        ("resnet18", 4, "at least 8 px"),
    ],
)
def test_impossible_image_sizes_are_one_line(name: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, size=size)
    assert "\n" not in str(caught.value)


def test_transformers_are_built_for_the_image_size() -> None:
    assert build("vit_b_32", size=96).encoder.pos_embedding.shape == (1, 1 + 9, 768)
    assert build("maxvit_t", size=224)(torch.randn(1, 3, 224, 224)).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19", "did you mean 'torchvision/resnet18'"),
        ("ResNet50", "did you mean 'torchvision/resnet50'"),
        ("", "is unknown; Valid after torchvision/"),
        ("inception_v3", "two sets of logits"),
        ("googlenet", "two sets of logits"),
        ("fasterrcnn_resnet50_fpn", "is a detection network, not a classifier"),
        ("deeplabv3_resnet50", "is a segmentation network"),
        ("r3d_18", "is a video network"),
        ("raft_small", "is an optical flow network"),
        ("quantized_resnet18", "is a quantized network, for inference"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name)


def test_missing_torchvision_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match=r"`pip install 'torchvision>=0\.21'`") as caught:
        build("resnet18")
    assert "\n" not in str(caught.value)
