"""Pieces that the networks share: activations and their initialisation."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


def initialise(model: nn.Module) -> None:
    """Set convolutions to Kaiming normal (fan out), linear layers to Xavier normal, biases to 0.

    Draws from torch's default CPU generator, in the order of `model.modules()`.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)
