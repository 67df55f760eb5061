"""A small network for runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from simpro_fast.models.layers import initialise

BN_MOMENTUM = 0.1


class SmallCNN(nn.Module):
    """Six 3x3 convolutions of 32, 32, 64, 64, 128, 128 channels, each with BN and activation.

    The first of each pair halves the side; then a global average pool and a linear layer.
    `forward` takes float [N, 3, H, W] with H, W >= 8 and returns logits [N, K].
    """

    def __init__(self, num_classes: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels_in = 3
        for channels in (32, 64, 128):
            for stride in (2, 1):
                layers += [
                    nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
                    nn.BatchNorm2d(channels, momentum=BN_MOMENTUM),
                    activation(),
                ]
                channels_in = channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels_in, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)).flatten(1))
