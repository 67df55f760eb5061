"""The head of a network: which layer it is, and as many heads as a method asks for."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from simpro_fast.models.layers import NormAct
from simpro_fast.utils.errors import ConfigError, UserError


def head_of(model: nn.Module) -> nn.Module:
    """The layer that gives the logits; everything else is the backbone.

    It is the last module, in the order of registration, that owns parameters, which is true of this
    package's networks; of timm's, the last such module of the classifier that they name.
    """
    if hasattr(model, "get_classifier"):
        model = model.get_classifier()  # type: ignore[operator]
    layers = (m for m in model.modules() if not isinstance(m, MethodParameters))
    return [m for m in layers if any(True for _ in m.parameters(recurse=False))][-1]


class MlpHead(nn.Sequential):
    """`model.head=mlp`: features [..., D], D hidden units with GELU, logits [..., K]."""

    def __init__(self, features: int, num_classes: int) -> None:
        hidden, last = nn.Linear(features, features), nn.Linear(features, num_classes)
        super().__init__(hidden, nn.GELU(), last)


def classifier_of(network: nn.Module) -> nn.Module:
    """Everything that comes after the features: the head, with its hidden layer if it has one."""
    return next((m for m in network.modules() if isinstance(m, MlpHead)), head_of(network))


class HeadNetwork(nn.Module):
    """A classifier alone, as the network that is trained on cached features [n, D]."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, features: Tensor) -> Output:
        output: Output = self.classifier(features)
        return output


METHOD_PREFIX = "method_parameters."
"""Of the names of `MethodParameters` in a network's state."""


class MethodParameters(nn.ParameterDict):
    """What a method trains beside the network, by name ("/" where that has a ".").

    As part of the network it is optimized, averaged over ranks and over time, checked and saved
    like the weights, whatever the engine; the network's forward does not use it, and an exported
    model does not have it.
    """


def adopt_parameters(network: nn.Module, method: nn.Module) -> None:
    """Let the network hold the method's parameters too, the same tensors; frozen ones stay out.

    Raises:
        UserError: a parameter is a scalar [], which DeepSpeed does not take.
    """
    for name, parameter in method.named_parameters():
        if parameter.requires_grad and not parameter.dim():
            raise UserError(
                f"{type(method).__name__}: its parameter {name} has the shape []; give it [1]"
            )
    own = {n.replace(".", "/"): p for n, p in method.named_parameters() if p.requires_grad}
    if own:
        network.add_module(METHOD_PREFIX[:-1], MethodParameters(own))


def outside_backbone(network: nn.Module) -> list[nn.Parameter]:
    """Parameters of the head, and of the method where it has some."""
    parts = [head_of(network), *(m for m in network.children() if isinstance(m, MethodParameters))]
    return [parameter for part in parts for parameter in part.parameters()]


def freeze_backbone(network: nn.Module) -> None:
    """Let only the head and the method's own parameters learn.

    The backbone asks for no gradient, so that backward ends at the head, and stays in evaluation
    mode: its batch norms normalise by their running statistics, which stay as they are.
    """
    learning = outside_backbone(network)
    network.requires_grad_(False)
    for parameter in learning:
        parameter.requires_grad_(True)
    head = head_of(network)
    for module in network.modules():
        if not any(part is head for part in module.modules()):
            module.eval()


Output = Tensor | tuple[Tensor, Tensor]
"""Of a network: logits, or with `with_features` logits and what the heads have seen."""


class MultiHead(nn.Linear):
    """H linear heads of K classes on the same features, as one matrix product.

    From [R, D] to [R, H, K], or from [R, B * D] to [R, B * H, K], branch-major; a single head
    without branches gives [R, K].

    Args:
        heads: H. branches: B, 0 for none.
        with_features: return (logits, features), the features [R, D] or [R, B, D]; so the whole
            network returns both, whatever it is.
    """

    def __init__(
        self,
        features: int,
        num_classes: int,
        *,
        heads: int,
        branches: int = 0,
        with_features: bool,
    ) -> None:
        super().__init__(features, heads * num_classes)
        self.heads, self.branches, self.num_classes = heads, branches, num_classes
        self.with_features = with_features

    def forward(self, features: Tensor) -> Output:  # type: ignore[override]
        seen = features.unflatten(1, (self.branches, -1)) if self.branches else features
        count = max(1, self.branches) * self.heads
        logits = super().forward(seen)
        if count > 1:
            logits = logits.reshape(len(logits), count, self.num_classes)
        return (logits, seen) if self.with_features else logits

    def logits(self, features: Tensor) -> Tensor:
        """Logits of other features, [..., D] to [..., H, K] or [..., K]."""
        logits = super().forward(features)
        return logits.unflatten(-1, (self.heads, self.num_classes)) if self.heads > 1 else logits


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


def give_mlp(network: nn.Module) -> None:
    """Put an `MlpHead` in place of the head, in place; weights from torch's CPU generator.

    Raises:
        ConfigError: the head is no linear layer.
    """
    size, old = feature_size(network), head_of(network)
    assert isinstance(old, nn.Linear)
    _replace(network, old, MlpHead(size, old.out_features))


def give_heads(
    network: nn.Module, *, heads: int, branches: int, with_features: bool, norm_impl: str, seed: int
) -> None:
    """Put `MultiHead` in place of the head, in place; the first head keeps its weights.

    The others start as the heads of this package's networks: Xavier normal from `seed`, biases 0.

    Args:
        heads, branches, with_features: see `MultiHead`; the defaults leave the network as it is.
        norm_impl: `model.norm_impl`, of the branches.

    Raises:
        ConfigError: the head is no linear layer, or the network has no pool for branches.
    """
    if heads == 1 and not branches and not with_features:
        return
    size = feature_size(network)
    old = head_of(network)
    assert isinstance(old, nn.Linear)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        new = MultiHead(
            size, old.out_features, heads=heads, branches=branches, with_features=with_features
        )
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


def head_tensors(network: nn.Module, classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight [H, K, D] and bias [H, K] of the heads, scale and shift [max(B, 1), D] of branches."""
    head = head_of(network)
    assert isinstance(head, nn.Linear)
    weight = head.weight.unflatten(0, (-1, classes))
    bias = head.weight.new_zeros(weight.shape[:2]) if head.bias is None else head.bias
    branches = next((m for m in network.modules() if isinstance(m, BranchPool)), None)
    if branches is None:
        scale = weight.new_ones(1, head.in_features)
        return weight, bias.view(weight.shape[:2]), scale, torch.zeros_like(scale)
    return weight, bias.view(weight.shape[:2]), *branches.affine()


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
