"""timm's networks as `model.name: timm/<name>`, and what their weights expect of images.

They are built untrained; `model.weights` fills them from a file (pretrained.py).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from simpro_fast.utils.errors import ConfigError, UserError, pip_line

PREFIX = "timm/"


class Preprocessing(NamedTuple):
    """What weights expect of images."""

    mean: tuple[float, ...]
    """Of each channel, on the scale 0 .. 1."""
    std: tuple[float, ...]
    interpolation: str | None
    """Name of the filter that scaled them; None: not known."""


def build_timm(name: str, num_classes: int, image_size: int) -> nn.Module:
    """The network `name` (with or without `timm/`) for K classes, untrained.

    Initial weights come from torch's default CPU generator. Dropout and stochastic depth are off:
    their masks would come from torch's generators, so that neither a resumed run nor one on
    another number of ranks would be the same, and they would blur the pseudo-labels, which are
    made in the same forward pass. Networks with position embeddings are built for `image_size`.

    Raises:
        UserError: timm is not installed, or does not fit the installed torch.
        ConfigError: unknown name (the nearest is named), not one linear classifier, or an image
            size that the network cannot take.
    """
    timm = _timm()
    short = name.removeprefix(PREFIX)
    config = _pretrained_config(timm, short)
    options = {"img_size": image_size} if config.fixed_input_size else {}
    try:
        network: nn.Module = timm.create_model(
            short, pretrained=False, num_classes=num_classes, **options
        )
        _switch_off_noise(network)
        logits = _forward_without_data(network, image_size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise ConfigError(
            f"model.name={PREFIX}{short} cannot take images of {image_size} px ({reason}); set "
            f"another data.image_size, it was made for {config.input_size[-1]}"
        ) from None
    classifier = network.get_classifier()  # type: ignore[operator]
    if not isinstance(classifier, nn.Linear) or logits.shape != (2, num_classes):
        raise ConfigError(
            f"model.name={PREFIX}{short} does not end in one linear layer "
            f"({type(classifier).__name__}); take another network, for example {PREFIX}resnet50"
        )
    return network


def expected_preprocessing(name: str) -> Preprocessing:
    """What the published weights of `timm/<name>` were trained with."""
    config = _pretrained_config(_timm(), name.removeprefix(PREFIX))
    return Preprocessing(tuple(config.mean), tuple(config.std), config.interpolation)


def converted(network: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of the original authors' names under timm's, position embeddings resampled to the
    network's; of a network that is none of timm's, as they are."""
    module = sys.modules[type(network).__module__]
    convert = getattr(module, "checkpoint_filter_fn", None)
    if not type(network).__module__.startswith("timm.") or convert is None:
        return tensors
    found: Mapping[str, Tensor] = convert(dict(tensors), network)
    return found


def layers_of(network: nn.Module, layer_decay: float) -> dict[str, int]:
    """The layer of each parameter, by name, in timm's own grouping: 0 is the stem, the head last.

    Args:
        layer_decay: for the message.

    Raises:
        ConfigError: the network does not say what its layers are.
    """
    if not hasattr(network, "group_matcher"):
        raise ConfigError(
            f"optim.layer_decay={layer_decay:g}: a {type(network).__name__} does not say what its "
            "layers are, as most of timm's networks do; take one of these, or optim.layer_decay=1"
        )
    matcher = network.group_matcher(coarse=False)  # type: ignore[operator]
    found: dict[str, int] = _timm().models.group_parameters(network, matcher, reverse=True)
    return found


def timm_names() -> list[str]:
    """The networks that `model.name` may take after `timm/`. Raises UserError without timm."""
    names: list[str] = _timm().list_models()
    return names


def _timm() -> ModuleType:
    try:
        import timm
    except Exception as error:  # of another torch it raises what it likes
        raise UserError(
            f"model.name={PREFIX}... needs timm, which cannot be imported "
            f"({' '.join(str(error).split())}); {pip_line('timm')}"
        ) from None
    return timm


def _pretrained_config(timm: ModuleType, short: str) -> Any:
    """Return timm's description of the weights of a name, such as `vit_base_patch16.mae`."""
    if not timm.is_model(short):
        valid = timm.list_models()
        near = difflib.get_close_matches(short.lower(), valid, n=3)
        hint = f"did you mean {' or '.join(PREFIX + n for n in near)}? " if near else ""
        raise ConfigError(
            f"model.name={PREFIX + short!r} is unknown; {hint}timm.list_models() names all "
            f"{len(valid)}"
        )
    try:
        return timm.get_pretrained_cfg(short)
    except RuntimeError:
        raise ConfigError(
            f"model.name={PREFIX + short!r}: timm has no weights of that tag; leave it out, or "
            "take one that timm.list_pretrained() names"
        ) from None


def _switch_off_noise(network: nn.Module) -> None:
    for module in network.modules():
        for name in ("p", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _forward_without_data(network: nn.Module, image_size: int) -> torch.Tensor:
    """Logits of two images in training mode, shapes only: what a network cannot take fails."""
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
    }
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    logits: torch.Tensor = functional_call(network, state, (images,))
    return logits
