"""Pieces that the networks share: normalisation with activation, initialisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from simpro_kernels import BatchNormAct
from torch import Tensor, nn
from torch.nn import functional

Activation = Literal["leaky_relu", "relu", "silu", "none"]
NEGATIVE_SLOPES = {"leaky_relu": 0.1, "relu": 0.0, "silu": 1.0, "none": 1.0}


class NormAct(BatchNormAct):
    """Batch norm, then `+ residual` where given, then the activation; parameters of BatchNorm2d.

    One fused operation; SiLU, which has no kernel, follows it as one of its own.
    """

    def __init__(
        self, channels: int, activation: Activation, *, momentum: float, impl: str
    ) -> None:
        slope = NEGATIVE_SLOPES[activation]
        super().__init__(channels, momentum=momentum, negative_slope=slope, impl=impl)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = super().forward(x, residual)
        return functional.silu(out) if self.activation == "silu" else out


class PixelConv(nn.Conv2d):
    """The convolution that takes the pixels [N, 3, H, W]; on CUDA with a fourth channel of zeros.

    cuDNN's channels_last kernels for tensor cores take channels by fours or eights, and leave three
    to slower ones. The weights stay [C, 3, k, k]; the sums are the same but for their order.
    """

    def forward(self, x: Tensor) -> Tensor:
        return with_zeros(self, x) if x.is_cuda else super().forward(x)


def with_zeros(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The convolution of x, both with channels of zeros up to a multiple of four."""
    zeros = (0, 0, 0, 0, 0, -x.shape[1] % 4)
    weight = functional.pad(conv.weight, zeros)
    return conv._conv_forward(functional.pad(x, zeros), weight, conv.bias)


MakeNorm = Callable[..., NormAct]
"""`norm(channels)`, with the network's activation; `norm(channels, activation="none")` without."""


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
