"""A small network for runs on a CPU."""

from __future__ import annotations

from torch import Tensor, nn

from simpro_fast.models.layers import MakeNorm, initialise

BN_MOMENTUM = 0.1


class SmallCNN(nn.Module):
    """Six 3x3 convolutions of 32, 32, 64, 64, 128, 128 channels, each with BN and activation.

    The first of each pair halves the side; then a global average pool and a linear layer.
    `forward` takes float [N, 3, H, W] with H, W >= 8 and returns logits [N, K].
    """

    def __init__(self, num_classes: int, norm: MakeNorm) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels_in = 3
        for index, channels in enumerate((32, 32, 64, 64, 128, 128)):
            conv = nn.Conv2d(channels_in, channels, 3, 2 - index % 2, 1, bias=False)
            # Names in the state dict count the activations, which were layers of their own.
            self.features.add_module(str(3 * index), conv)
            self.features.add_module(str(3 * index + 1), norm(channels))
            channels_in = channels
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels_in, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)).flatten(1))
