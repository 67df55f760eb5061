"""torchvision's classifiers as `model.name: torchvision/<name>`.

They are built untrained; `model.weights` fills them from a file (pretrained.py). Nothing is ever
downloaded.
"""

from __future__ import annotations

import difflib
import re
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from simpro_fast.models.head import head_of
from simpro_fast.utils.errors import ConfigError, UserError, pip_line

PREFIX = "torchvision/"
# In training these return a second classifier's logits as well, which no method here trains.
_TWO_HEADED = ("googlenet", "inception_v3")
_OTHER_TASKS = {
    "detection": "a detection network",
    "segmentation": "a segmentation network",
    "video": "a video network",
    "optical_flow": "an optical flow network",
    "quantization": "a quantized network, for inference",
}


def build_torchvision(name: str, num_classes: int, image_size: int) -> nn.Module:
    """The classifier `name` (with or without `torchvision/`) for K classes, untrained.

    Initial weights come from torch's default CPU generator. Dropout and stochastic depth are off:
    their masks would come from torch's generators, so that neither a resumed run nor one on
    another number of ranks would be the same, and they would blur the pseudo-labels, which are
    made in the same forward pass. ViT and MaxViT are built for `image_size`.

    Raises:
        UserError: torchvision is not installed, or does not fit the installed torch.
        ConfigError: unknown name (the nearest is named), not a plain classifier, or an image size
            that the network cannot take.
    """
    models = _torchvision_models()
    short = name.removeprefix(PREFIX)
    _check_name(models, short)
    options: dict[str, Any] = {}
    if short.startswith("vit_"):
        _check_patches(short, image_size)
        options["image_size"] = image_size
    elif short.startswith("maxvit_"):
        options["input_size"] = (image_size, image_size)
    try:
        network: nn.Module = models.get_model(
            short, weights=None, num_classes=num_classes, **options
        )
        _switch_off_noise(network)
        logits = _forward_without_data(network, image_size)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"model.name={PREFIX}{short} cannot take images of {image_size} px ({reason}); "
            "set another data.image_size, torchvision's networks are made for 224"
        ) from None
    assert logits.shape == (2, num_classes)
    assert next(head_of(network).parameters()).shape[0] == num_classes
    return network


def torchvision_names() -> list[str]:
    """The classifiers that `model.name` may take after `torchvision/`.

    Raises:
        UserError: torchvision is not installed, or does not fit the installed torch.
    """
    models = _torchvision_models()
    return [n for n in models.list_models(module=models) if n not in _TWO_HEADED]


def _torchvision_models() -> ModuleType:
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter when built for another torch
        raise UserError(
            f"model.name={PREFIX}... needs torchvision, which cannot be imported "
            f"({' '.join(str(error).split())}); {pip_line('torchvision')}"
        ) from None
    return models


def _check_name(models: ModuleType, short: str) -> None:
    valid = torchvision_names()
    if short in valid:
        return
    if short in _TWO_HEADED:
        raise ConfigError(
            f"model.name={PREFIX}{short} gives two sets of logits in training, which is not "
            f"supported; take another network, for example {PREFIX}resnet50"
        )
    for module, kind in _OTHER_TASKS.items():
        if short in models.list_models(module=getattr(models, module)):
            raise ConfigError(
                f"model.name={PREFIX}{short} is {kind}, not a classifier that can be trained; "
                f"take one like {PREFIX}resnet50"
            )
    near = difflib.get_close_matches(short.lower(), valid, n=1)
    hint = f"did you mean {PREFIX + near[0]!r}? " if near else ""
    raise ConfigError(
        f"model.name={PREFIX + short!r} is unknown; {hint}Valid after {PREFIX}: {', '.join(valid)}"
    )


def _check_patches(short: str, image_size: int) -> None:
    found = re.search(r"_(\d+)$", short)
    patch = int(found[1]) if found else 1
    if image_size % patch:
        below, above = image_size // patch * patch, -(-image_size // patch) * patch
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"model.name={PREFIX}{short} cuts images into patches of {patch} px, so "
            f"data.image_size={image_size} must be a multiple of it; the nearest: {nearest}"
        )


def _switch_off_noise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]


def _forward_without_data(network: nn.Module, image_size: int) -> torch.Tensor:
    """Logits of two images in training mode, shapes only: what a network cannot take fails."""
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
    }
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    logits: torch.Tensor = functional_call(network, state, (images,))
    return logits
