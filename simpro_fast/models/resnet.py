"""ResNet-50 with the two stems in use: for small images, and ImageNet's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simpro_fast.models.layers import MakeNorm, PixelConv

BN_MOMENTUM = 0.1
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with BN, the last one 4 times as wide, plus the shortcut.

    The stride is the 3x3 convolution's. Where shape or width change, the shortcut is a 1x1
    convolution with BN.
    """

    def __init__(self, channels_in: int, width: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        channels_out = EXPANSION * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = norm(channels_out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                norm(channels_out, activation="none"),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x))))
        return self.bn3(self.conv3(out), self.downsample(x))


def _stage(blocks: int, channels_in: int, width: int, stride: int, norm: MakeNorm) -> nn.Sequential:
    """Bottlenecks of one width; the first one has the stride."""
    first = Bottleneck(channels_in, width, stride, norm)
    others = [Bottleneck(EXPANSION * width, width, 1, norm) for _ in range(blocks - 1)]
    return nn.Sequential(first, *others)


class ResNet50(nn.Module):
    """ResNet-50: stages of 3, 4, 6, 3 bottlenecks, 256 to 2048 channels, strides 1, 2, 2, 2.

    Args:
        num_classes: K.
        norm: makes a batch norm with the activation; the published nets use ReLU.
        small_stem: True: one 3x3 convolution of stride 1 and no max-pool, as in the nets that the
            long-tailed papers train on 32 and 64 px images (without the two heads that theirs
            carry and never train). False: 7x7 of stride 2 and a 3x3 max-pool of stride 2, as for
            ImageNet; the parameters then bear the names of torchvision's `resnet50`.

    `forward` takes float [N, 3, H, W] and returns logits [N, K].
    """

    def __init__(self, num_classes: int, norm: MakeNorm, *, small_stem: bool) -> None:
        super().__init__()
        if small_stem:
            self.conv1 = PixelConv(3, 64, 3, 1, 1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = PixelConv(3, 64, 7, 2, 3, bias=False)
            self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.bn1 = norm(64)
        self.layer1 = _stage(3, 64, 64, 1, norm)
        self.layer2 = _stage(4, 256, 128, 2, norm)
        self.layer3 = _stage(6, 512, 256, 2, norm)
        self.layer4 = _stage(3, 1024, 512, 2, norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # As in the released code: with torch's default a fresh network of 127 classes gives no
        # class more than 0.04, far below the threshold of 0.2.
        nn.init.xavier_normal_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))
