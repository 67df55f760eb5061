"""Networks by name."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from simpro_fast.config.schema import ModelConfig
from simpro_fast.models import resnet, small_cnn, wideresnet
from simpro_fast.models.head import give_classifier, give_heads
from simpro_fast.models.layers import Activation, MakeNorm, NormAct
from simpro_fast.models.timm_nets import PREFIX, build_timm, expected_preprocessing, timm_names
from simpro_fast.utils.dotted_path import import_function, is_dotted
from simpro_fast.utils.errors import ConfigError, UserError

MIN_IMAGE_SIZE = 8
ModelBuilder = Callable[..., nn.Module]
_REGISTERED: dict[str, ModelBuilder] = {}
_WIDE = re.compile(r"wrn_(\d+)_(\d+)")


def list_models() -> tuple[str, ...]:
    """Names for `model.name`; any `wrn_<depth>_<width>` with depth = 6 n + 4 works as well, and
    `timm/<name>` of any network of timm (`timm_names`).

    `resnet50_3x3` has a 3x3 stem of stride 1 and no max-pool (32 and 64 px), `resnet50` the 7x7
    stem with max-pool of ImageNet.
    """
    return ("small_cnn", "wrn_28_2", "wrn_28_8", "resnet50_3x3", "resnet50")


def register_model(name: str, builder: ModelBuilder) -> None:
    """Let `model.name: name` stand for a network of your own, in this process.

    A run that is started by a launcher names the builder by its dotted path instead, without
    registration: `model.name: my_package.my_module.my_builder`. `load_model` needs the same:
    registration again, or a module that can be imported.

    Args:
        name: of no shipped network; a registered one is replaced.
        builder: called as `builder(num_classes=K, image_size=S)` with torch's CPU generator
            seeded; returns a module from float [N, 3, S, S] to logits [N, K]. Randomness within
            its forward pass (dropout) makes resumed runs differ from uninterrupted ones.

    Raises:
        ValueError: the name belongs to a shipped network.
    """
    if name in list_models() or _WIDE.fullmatch(name) or name.startswith(PREFIX):
        raise ValueError(f"{name!r} is a shipped network; choose another name")
    _REGISTERED[name] = builder


def needs_import(name: str) -> bool:
    """Whether building `model.name: name` imports a module that is not ours."""
    return name not in _REGISTERED and is_dotted(name)


def build_model(
    model: ModelConfig,
    num_classes: int,
    image_size: int,
    *,
    seed: int = 1,
    heads: int = 1,
    branches: int = 0,
    with_features: bool = False,
    exported: bool = False,
) -> nn.Module:
    """The network `model.name` on the CPU, in training mode, freshly initialised.

    `model.weights` is not read; `load_pretrained` does that.

    Args:
        model: name, activation (None: leaky_relu in Wide ResNets and the small network, relu in
            ResNet-50), batch-norm momentum (None: 0.001 in Wide ResNets as published, 0.1 or
            timm's own in the others), the Wide ResNet quirk and the implementation of batch
            norm with activation.
        num_classes: K.
        image_size: side in pixels; the networks take any from 8 up.
        seed: decides the initial weights alone; torch's global generators are left as they were.
        heads, branches, with_features: what a method asks for besides one head, see `give_heads`.
        exported: for weights of a finished run, see `CosineHead`.

    Returns:
        Module from float [N, 3, H, W] to logits [N, K], or to what `MultiHead` gives.

    Raises:
        ConfigError: unknown name, impossible depth, images that the network cannot take, or an
            activation for a network that has its own.
        UserError: timm is needed and not installed.
    """
    if image_size < MIN_IMAGE_SIZE:
        raise ConfigError(
            f"model.name={model.name} needs images of at least {MIN_IMAGE_SIZE} px, "
            f"got data.image_size={image_size}"
        )
    # Only the CPU generator is used here, so that no CUDA context is touched.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = network_maker(model)(num_classes, image_size)
        give_classifier(network, model.head, exported=exported)
    if branches and model.name.startswith(PREFIX):
        raise ConfigError(
            f"model.name={model.name}: the method puts batch norms before the pool, which works in "
            f"{', '.join(list_models())} and other Wide ResNets only"
        )
    give_heads(
        network,
        heads=heads,
        branches=branches,
        with_features=with_features,
        norm_impl=model.norm_impl,
        seed=seed,
    )
    if model.bn_momentum is not None:
        for module in network.modules():
            if isinstance(module, _BatchNorm):
                module.momentum = model.bn_momentum
    return network


def network_maker(model: ModelConfig) -> Callable[[int, int], nn.Module]:
    """What builds `model.name` from the number of classes and the image side.

    Raises:
        ConfigError: unknown name, impossible depth, or an activation for a network that has its
            own.
        UserError: timm is needed and not installed.
    """
    own = _REGISTERED.get(model.name)
    if needs_import(model.name):
        own = import_function("model.name", model.name)
    if own is not None or model.name.startswith(PREFIX):
        if model.activation is not None:
            raise ConfigError(
                f"model.activation={model.activation}: {model.name} has its own; leave it out"
            )
        if own is not None:
            return functools.partial(_build_own, own, f"model.name={model.name}")
        expected_preprocessing(model.name)  # refuses a name that timm does not know
        return functools.partial(build_timm, model.name)
    if model.name in ("resnet50_3x3", "resnet50"):
        norm = _norm(model, "relu", resnet.BN_MOMENTUM)
        stem = model.name == "resnet50_3x3"
        return lambda classes, _: resnet.ResNet50(classes, norm, small_stem=stem)
    if model.name == "small_cnn":
        norm = _norm(model, "leaky_relu", small_cnn.BN_MOMENTUM)
        return lambda classes, _: small_cnn.SmallCNN(classes, norm)
    wide = _WIDE.fullmatch(model.name)
    if wide is None:
        near = _nearest(model.name)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(
            f"model.name={model.name!r} is unknown; {hint}"
            f"Valid: {', '.join((*list_models(), *_REGISTERED))}, any wrn_<depth>_<width>, "
            "timm/<name>, or package.module.function for a network of your own (a name of "
            "register_model holds in the process that registered it)"
        )
    depth, width = int(wide[1]), int(wide[2])
    if depth < 10 or (depth - 4) % 6 or width < 1:
        below = max(10, depth - (depth - 4) % 6)
        raise ConfigError(
            f"model.name={model.name}: the depth must be 6 n + 4 (10, 16, 22, 28, ...) and the "
            f"width at least 1; the nearest is wrn_{below}_{max(1, width)}"
        )
    norm = _norm(model, "leaky_relu", wideresnet.BN_MOMENTUM)
    return lambda classes, _: wideresnet.WideResNet(depth, width, classes, norm, model.skip_quirk)


def _build_own(builder: ModelBuilder, source: str, num_classes: int, image_size: int) -> nn.Module:
    """A stranger's network, tried on two images.

    Raises:
        UserError: it cannot be called so, is no module, has no parameters, or does not give logits
            [N, K].
    """
    try:
        inspect.signature(builder).bind(num_classes=num_classes, image_size=image_size)
    except (TypeError, ValueError):
        raise UserError(
            f"{source}: it cannot be called as builder(num_classes=K, image_size=S)"
        ) from None
    network = builder(num_classes=num_classes, image_size=image_size)
    if not isinstance(network, nn.Module):
        raise UserError(f"{source}: the builder returned {type(network).__name__}, not a module")
    network.eval()  # batch norm stays as it is
    with torch.no_grad():
        logits = network(torch.zeros(2, 3, image_size, image_size))
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, num_classes):
        got = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(f"{source}: two images gave {got}, expected logits [2, {num_classes}]")
    if next(network.parameters(), None) is None:
        raise UserError(f"{source}: the network has no parameters, so nothing to train")
    return network.train()


def _norm(model: ModelConfig, activation: Activation, momentum: float) -> MakeNorm:
    """Batch norm with the activation that is set, else the network's own."""
    return functools.partial(
        NormAct,
        activation=model.activation or activation,
        momentum=momentum,
        impl=model.norm_impl,
    )


def _nearest(name: str) -> str | None:
    """A network of that name at timm (`resnet18`, `torchvision/resnet18`), else one spelt alike."""
    short = name.rpartition("/")[2]
    try:
        if short in timm_names():
            return PREFIX + short
    except UserError:  # not installed, and not what is wrong here
        pass
    close = difflib.get_close_matches(short, (*list_models(), *_REGISTERED), n=1)
    return close[0] if close else None
