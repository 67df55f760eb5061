"""Networks by name."""

from __future__ import annotations

import difflib
import functools
import re

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from simpro_fast.config.schema import ModelConfig
from simpro_fast.errors import ConfigError, UserError
from simpro_fast.models import resnet, small_cnn, wideresnet
from simpro_fast.models.head import give_heads
from simpro_fast.models.layers import Activation, MakeNorm, NormAct
from simpro_fast.models.torchvision_nets import PREFIX, build_torchvision, torchvision_names

MIN_IMAGE_SIZE = 8


def list_models() -> tuple[str, ...]:
    """Names for `model.name`; any `wrn_<depth>_<width>` with depth = 6 n + 4 works as well, and
    `torchvision/<name>` of any classifier there (`torchvision_names`).

    `resnet50_3x3` has a 3x3 stem of stride 1 and no max-pool (32 and 64 px), `resnet50` the 7x7
    stem with max-pool of ImageNet.
    """
    return ("small_cnn", "wrn_28_2", "wrn_28_8", "resnet50_3x3", "resnet50")


def build_model(
    model: ModelConfig,
    num_classes: int,
    image_size: int,
    *,
    seed: int = 1,
    heads: int = 1,
    branches: int = 0,
    hand_on: bool = False,
) -> nn.Module:
    """The network `model.name` on the CPU, in training mode, freshly initialised.

    `model.weights` is not read; `load_pretrained` does that.

    Args:
        model: name, activation (None: leaky_relu in Wide ResNets and the small network, relu in
            ResNet-50), batch-norm momentum (None: 0.001 in Wide ResNets as published, 0.1 or
            torchvision's own in the others), the Wide ResNet quirk and the implementation of batch
            norm with activation.
        num_classes: K.
        image_size: side in pixels; the networks take any from 8 up.
        seed: decides the initial weights alone; torch's global generators are left as they were.
        heads, branches, hand_on: what a method asks for besides one head, see `give_heads`.

    Returns:
        Module from float [N, 3, H, W] to logits [N, K], or to what `MultiHead` gives.

    Raises:
        ConfigError: unknown name, impossible depth, images that the network cannot take, or an
            activation for a network that has its own.
        UserError: torchvision is needed and not installed.
    """
    if image_size < MIN_IMAGE_SIZE:
        raise ConfigError(
            f"model.name={model.name} needs images of at least {MIN_IMAGE_SIZE} px, "
            f"got data.image_size={image_size}"
        )
    # Only the CPU generator is used here, so that no CUDA context is touched.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = _construct(model, num_classes, image_size)
    if branches and model.name.startswith(PREFIX):
        raise ConfigError(
            f"model.name={model.name}: the method puts batch norms before the pool, which works in "
            f"{', '.join(list_models())} and other Wide ResNets only"
        )
    give_heads(
        network,
        heads=heads,
        branches=branches,
        hand_on=hand_on,
        norm_impl=model.norm_impl,
        seed=seed,
    )
    if model.bn_momentum is not None:
        for module in network.modules():
            if isinstance(module, _BatchNorm):
                module.momentum = model.bn_momentum
    return network


def _construct(model: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
    if model.name.startswith(PREFIX):
        if model.activation is not None:
            raise ConfigError(
                f"model.activation={model.activation}: {model.name} has its own; leave it out"
            )
        return build_torchvision(model.name, num_classes, image_size)
    if model.name in ("resnet50_3x3", "resnet50"):
        norm = _norm(model, "relu", resnet.BN_MOMENTUM)
        return resnet.ResNet50(num_classes, norm, small_stem=model.name == "resnet50_3x3")
    if model.name == "small_cnn":
        norm = _norm(model, "leaky_relu", small_cnn.BN_MOMENTUM)
        return small_cnn.SmallCNN(num_classes, norm)
    wide = re.fullmatch(r"wrn_(\d+)_(\d+)", model.name)
    if wide is None:
        near = _nearest(model.name)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(
            f"model.name={model.name!r} is unknown; {hint}"
            f"Valid: {', '.join(list_models())}, any wrn_<depth>_<width>, or torchvision/<name>"
        )
    depth, width = int(wide[1]), int(wide[2])
    if depth < 10 or (depth - 4) % 6 or width < 1:
        below = max(10, depth - (depth - 4) % 6)
        raise ConfigError(
            f"model.name={model.name}: the depth must be 6 n + 4 (10, 16, 22, 28, ...) and the "
            f"width at least 1; the nearest is wrn_{below}_{max(1, width)}"
        )
    norm = _norm(model, "leaky_relu", wideresnet.BN_MOMENTUM)
    return wideresnet.WideResNet(depth, width, num_classes, norm, model.skip_quirk)


def _norm(model: ModelConfig, activation: Activation, momentum: float) -> MakeNorm:
    """Batch norm with the activation that is set, else the network's own."""
    return functools.partial(
        NormAct,
        activation=model.activation or activation,
        momentum=momentum,
        impl=model.norm_impl,
    )


def _nearest(name: str) -> str | None:
    """A network of that name at torchvision (`resnet18`, `timm/resnet18`), else one spelt alike."""
    short = name.rpartition("/")[2]
    try:
        if short in torchvision_names():
            return PREFIX + short
    except UserError:  # not installed, and not what is wrong here
        pass
    close = difflib.get_close_matches(short, list_models(), n=1)
    return close[0] if close else None
