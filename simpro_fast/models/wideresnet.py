"""Wide ResNet for small images, in the form that the FixMatch family of code trains."""

from __future__ import annotations

from torch import Tensor, nn

from simpro_fast.models.layers import MakeNorm, PixelConv, initialise

BN_MOMENTUM = 0.001


class Block(nn.Module):
    """Pre-activation residual block: BN, activation, 3x3, BN, activation, 3x3, plus the shortcut.

    Args:
        channels_in, channels_out: where they differ the shortcut is a 1x1 convolution.
        stride: of the first convolution and of the shortcut.
        norm: makes a batch norm with the activation.
        pre_activation: what the first BN and activation serve. "branch": the residual branch only.
            "both": the shortcut takes their output too. "none": the block has no such layers and
            both paths take the raw input.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        stride: int,
        norm: MakeNorm,
        pre_activation: str,
    ) -> None:
        super().__init__()
        self.pre_activation = pre_activation
        if pre_activation != "none":
            self.bn1 = norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn2 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        branch = x
        if self.pre_activation != "none":
            branch = self.bn1(x)
        residual = branch if self.pre_activation == "both" else x
        out = self.conv2(self.bn2(self.conv1(branch)))
        return self.shortcut(residual) + out


class WideResNet(nn.Module):
    """WRN-d-w: 3x3 stem of 16 channels, three stages of (d - 4) / 6 blocks, global average pool.

    Args:
        depth: 6 n + 4.
        width: stages have 16, 32, 64 times `width` channels and strides 1, 2, 2.
        num_classes: K.
        norm: makes a batch norm with the activation.
        skip_quirk: the published nets compute the first BN and activation of stages 2 and 3
            (where the width changes) and then discard the result: conv1 and the 1x1 shortcut take
            the raw input, and that BN never gets a gradient. True keeps this function and leaves
            the dead layers out, so no parameter is without a gradient. False gives conv1 the
            pre-activation, as usual in pre-activation ResNets.

    `forward` takes float [N, 3, H, W] and returns logits [N, K].
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_classes: int,
        norm: MakeNorm,
        skip_quirk: bool = True,
    ) -> None:
        super().__init__()
        blocks_per_stage = (depth - 4) // 6
        widths = [16, 16 * width, 32 * width, 64 * width]
        self.stem = PixelConv(3, widths[0], 3, 1, 1, bias=False)
        stages = []
        for stage in range(3):
            channels_in, channels_out = widths[stage], widths[stage + 1]
            blocks = []
            for index in range(blocks_per_stage):
                use = "branch"
                if index == 0 and channels_in != channels_out:
                    # Stage 1 activates once for both paths; stages 2 and 3 show the quirk.
                    use = "both" if stage == 0 else ("none" if skip_quirk else "branch")
                stride = 2 if index == 0 and stage > 0 else 1
                blocks.append(Block(channels_in, channels_out, stride, norm, use))
                channels_in = channels_out
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.bn = norm(widths[3])
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[3], num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(self.pool(self.bn(x)).flatten(1))
