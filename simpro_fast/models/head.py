"""The head of a network: which layer it is, and as many heads as a method asks for."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from simpro_fast.errors import ConfigError
from simpro_fast.models.layers import NormAct


def head_of(model: nn.Module) -> nn.Module:
    """The layer that gives the logits; everything else is the backbone.

    It is the last module, in the order of registration, that owns parameters: true of this
    package's networks and of every classifier of torchvision, whatever they call it (`fc`, `head`,
    `classifier.1`, `heads.head`).
    """
    return [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))][-1]


class MultiHead(nn.Linear):
    """H linear heads of K classes on the same features, as one matrix product.

    From [R, D] to [R, H, K], or from [R, B * D] to [R, B * H, K], branch-major; a single head
    without branches gives [R, K]. With `hand_on` the result is flat, [R, n], and followed by
    the features as they came, which `parts` takes apart: so a network returns both, whatever it is.

    Args:
        heads: H. branches: B, 0 for none.
        hand_on: see above.
    """

    def __init__(
        self, features: int, num_classes: int, *, heads: int, branches: int = 0, hand_on: bool
    ) -> None:
        super().__init__(features, heads * num_classes)
        self.heads, self.branches, self.num_classes = heads, branches, num_classes
        self.hand_on = hand_on

    @property
    def columns(self) -> int:
        """Logits of an image."""
        return max(1, self.branches) * self.out_features

    def forward(self, features: Tensor) -> Tensor:
        seen = features.unflatten(1, (self.branches, -1)) if self.branches else features
        logits = super().forward(seen)
        if self.hand_on:
            return torch.cat([logits.flatten(1), features], dim=1)
        return self._shaped(logits)

    def parts(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as above, and features [R, D] or [R, B, D] where they were handed on."""
        if not self.hand_on:
            return output, None
        logits, features = output.tensor_split([self.columns], dim=1)
        if self.branches:
            features = features.unflatten(1, (self.branches, self.in_features))
        return self._shaped(logits), features

    def logits(self, features: Tensor) -> Tensor:
        """Logits of other features, [..., D] to [..., H, K] or [..., K]."""
        logits = super().forward(features)
        return logits.unflatten(-1, (self.heads, self.num_classes)) if self.heads > 1 else logits

    def _shaped(self, logits: Tensor) -> Tensor:
        count = max(1, self.branches) * self.heads
        return logits.reshape(len(logits), count, self.num_classes) if count > 1 else logits


class BranchPool(nn.Module):
    """Batch norms side by side on one feature map, each pooled: [R, D, h, w] to [R, B, D]."""

    def __init__(self, features: int, branches: int, *, momentum: float, impl: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            NormAct(features, "none", momentum=momentum, impl=impl) for _ in range(branches)
        )

    def forward(self, maps: Tensor) -> Tensor:
        return torch.stack([norm(maps).mean((2, 3)) for norm in self.norms], dim=1)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift of a pooled feature in evaluation, each [B, D]."""
        scale, shift = [], []
        for norm in self.norms:
            assert isinstance(norm, NormAct) and norm.running_mean is not None
            assert norm.running_var is not None
            factor = norm.weight / (norm.running_var + norm.eps).sqrt()
            scale.append(factor)
            shift.append(norm.bias - norm.running_mean * factor)
        return torch.stack(scale), torch.stack(shift)


def feature_size(network: nn.Module) -> int:
    """D, the number of features that the head sees.

    Raises:
        ConfigError: the head is no linear layer.
    """
    head = head_of(network)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"the head of this network is a {type(head).__name__}, not a linear layer, and the "
            "method needs its features or several heads; take another model.name"
        )
    return head.in_features


def give_heads(
    network: nn.Module, *, heads: int, branches: int, hand_on: bool, norm_impl: str, seed: int
) -> None:
    """Put `MultiHead` in place of the head, in place; the first head keeps its weights.

    The others start as the heads of this package's networks: Xavier normal from `seed`, biases 0.

    Args:
        heads, branches, hand_on: see `MultiHead`; one head, no branches and nothing handed on
            leave the network as it is.
        norm_impl: `model.norm_impl`, of the branches.

    Raises:
        ConfigError: the head is no linear layer, or the network has no pool for branches.
    """
    if heads == 1 and not branches and not hand_on:
        return
    size = feature_size(network)
    old = head_of(network)
    assert isinstance(old, nn.Linear)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        new = MultiHead(size, old.out_features, heads=heads, branches=branches, hand_on=hand_on)
        for block in new.weight.detach().split(old.out_features):
            nn.init.xavier_normal_(block)
    with torch.no_grad():
        nn.init.zeros_(new.bias)
        new.weight[: old.out_features].copy_(old.weight)
        if old.bias is not None:
            new.bias[: old.out_features].copy_(old.bias)
    _replace(network, old, new.to(old.weight.device, old.weight.dtype))
    if branches:
        pool = getattr(network, "pool", None) or getattr(network, "avgpool", None)
        if not isinstance(pool, nn.AdaptiveAvgPool2d) or pool.output_size not in (1, (1, 1)):
            raise ConfigError(
                "the method puts batch norms before the global average pool, which this network "
                "does not have as a layer of its own; take a Wide ResNet, a ResNet or small_cnn"
            )
        norms = [m for m in network.modules() if isinstance(m, NormAct)]
        momentum = norms[0].momentum if norms else 0.1
        assert momentum is not None
        _replace(network, pool, BranchPool(size, branches, momentum=momentum, impl=norm_impl))


def plain_copy(network: nn.Module) -> nn.Module:
    """A copy with one linear head and without branches: the network that a test rule fits into."""
    groups = [group for m in network.modules() if (group := getattr(m, "process_group", None))]
    plain = copy.deepcopy(network, {id(group): group for group in groups})
    head = head_of(plain)
    if isinstance(head, MultiHead):
        linear = nn.Linear(head.in_features, head.num_classes)
        _replace(plain, head, linear.to(head.weight.device, head.weight.dtype))
    for module in list(plain.modules()):
        if isinstance(module, BranchPool):
            _replace(plain, module, nn.AdaptiveAvgPool2d(1))
    return plain.eval().requires_grad_(False)


def _replace(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in network.modules():
        for name, child in parent.named_children():
            if child is old:
                setattr(parent, name, new)
