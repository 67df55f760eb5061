"""Which part of a network is the head."""

from __future__ import annotations

from torch import nn


def head_of(model: nn.Module) -> nn.Module:
    """The layer that gives the logits; everything else is the backbone.

    It is the last module, in the order of registration, that owns parameters: true of this
    package's networks and of every classifier of torchvision, whatever they call it (`fc`, `head`,
    `classifier.1`, `heads.head`).
    """
    return [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))][-1]
