"""Optimizers and the learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from simpro_fast.config.schema import OptimConfig
from simpro_fast.models.head import MethodParameters, outside_backbone
from simpro_fast.models.timm_nets import layers_of
from simpro_fast.utils.errors import ConfigError

_NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def param_groups(
    model: nn.Module,
    weight_decay: float,
    backbone_lr_scale: float = 1.0,
    decay_shortcut_norm: bool = False,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Optimizer groups: weights with decay; biases and everything in norm layers without.

    Decided by module type; of a method's own parameters, scalars and vectors are not decayed. With
    `decay_shortcut_norm` the weight (not the bias) of the norm in a ResNet's projection shortcut is
    decayed, as the released code does, which looks for "bn" in names and misses this one. Frozen
    parameters are left out, shared ones counted once, an empty group omitted.

    Returns:
        Dictionaries with `params`, `weight_decay` and `lr_scale`, for a torch optimizer and
        `set_learning_rate`; at most two for each scale of `_lr_scales`, from the lowest up.

    Raises:
        ConfigError: see `layers_of`.
    """
    scales = _lr_scales(model, backbone_lr_scale, layer_decay)
    groups: defaultdict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        decayed_norm = decay_shortcut_norm and path.endswith("downsample.1")
        of_method = isinstance(module, MethodParameters)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            norm = isinstance(module, _NORM_LAYERS) and not decayed_norm
            exempt = norm or name.endswith("bias") or (of_method and parameter.dim() < 2)
            groups[scales[parameter], exempt].append(parameter)
    return [
        {"params": groups[key], "weight_decay": 0.0 if key[1] else weight_decay, "lr_scale": key[0]}
        for key in sorted(groups)
    ]


def _lr_scales(
    model: nn.Module, backbone_lr_scale: float, layer_decay: float
) -> dict[nn.Parameter, float]:
    """What the learning rate of each parameter is multiplied with.

    1 outside the backbone; in its layer l of 0 .. L, counted with the head as the last one,
    backbone_lr_scale * layer_decay ** (L - l).
    """
    layers = layers_of(model, layer_decay) if layer_decay != 1 else {}
    last = max(layers.values(), default=0)
    scales = {
        parameter: backbone_lr_scale * layer_decay ** (last - layers.get(name, last))
        for name, parameter in model.named_parameters()
    }
    return scales | dict.fromkeys(outside_backbone(model), 1.0)


def build_optimizer(optim: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SGD (Nesterov where there is momentum) or AdamW over `param_groups`, torch's own.

    The rate of each step comes from `learning_rate`; the caller sets it by `set_learning_rate`.
    """
    groups = param_groups(
        model,
        optim.weight_decay,
        optim.backbone_lr_scale,
        optim.decay_shortcut_norm,
        optim.layer_decay,
    )
    # One kernel on CUDA. On CPU the fused step rounds an element by its place in a vector, so that
    # ZeRO's flat parts would part from whole weights by the last bit.
    fused = any(p.is_cuda for p in model.parameters())
    how = {"fused": fused, "foreach": not fused}
    optimizer: torch.optim.Optimizer
    if optim.name == "adamw":
        betas = (optim.momentum, 0.999)
        # Capturable: its step count stays on the device, so that a CUDA graph can hold the step.
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, capturable=fused, **how)
    else:
        optimizer = torch.optim.SGD(
            groups,
            lr=optim.lr,
            momentum=optim.momentum,
            nesterov=optim.nesterov and optim.momentum > 0,
            **how,
        )
    optimizer.register_step_pre_hook(_FirstStepLayouts())
    return optimizer


class _FirstStepLayouts:
    """Refuses gradients whose memory layout differs from that of their weights.

    A fused step pairs their elements by address (silently so on CPU, in torch 2.14). Autograd makes
    gradients of the weights' layout and later steps reuse them, so one look is enough.
    """

    def __init__(self) -> None:
        self._checked = False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._checked:
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and _steps(weight.grad) != _steps(weight):
                    raise RuntimeError(
                        f"the gradient of a weight {list(weight.shape)} has strides "
                        f"{weight.grad.stride()}, the weight {weight.stride()}"
                    )
        self._checked = True


def _steps(tensor: Tensor) -> list[int]:
    """Strides, short of those over one element, which lead nowhere and which autograd leaves."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def set_learning_rate(groups: Iterable[dict[str, Any]], lr: float | Tensor) -> None:
    """Give an optimizer's `param_groups` the rate `lr`, each times its own `lr_scale`."""
    for group in groups:
        group["lr"] = lr * group["lr_scale"]


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step `step`, counted from 0, of a run of `total_steps`.

    During `warmup_steps` it rises linearly and reaches `lr` at the last of them. Afterwards, with
    x the share of the remaining steps that has passed:

        cosine_7_16  lr * max(0, cos(7 pi x / 16)), which ends at 0.195 lr (FixMatch, SimPro)
        cosine       lr * (1 + cos(pi x)) / 2
        constant     lr

    Raises:
        ConfigError: the warm-up is not shorter than the run.
    """
    warmup = optim.warmup_steps
    if warmup >= total_steps:
        raise ConfigError(
            f"optim.warmup_steps={warmup} must be smaller than train.steps={total_steps}"
        )
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    x = (step - warmup) / (total_steps - warmup)
    if optim.schedule == "cosine_7_16":
        return optim.lr * max(0.0, math.cos(7 * math.pi * x / 16))
    if optim.schedule == "cosine":
        return optim.lr * (1 + math.cos(math.pi * min(x, 1.0))) / 2
    return optim.lr
