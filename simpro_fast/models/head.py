"""The head of a network: which layer it is, and as many heads as a method asks for."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simpro_fast.models.layers import NormAct
from simpro_fast.models.lora import lora_layers, merge
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


PAD_FROM = 1000
"""Classes from which on a GPU gets rows of logits that 16 bytes divide: by count, with fewer the
copies of the weights (some ten launches) take what the faster product saves."""


def linear(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As F.linear; on a GPU many classes, in a number that 8 does not divide, are computed as the
    next multiple and cut, [..., K] with spare elements after each row.

    Matrix products and the loss kernels read rows of 21,841 bfloat16 numbers two bytes at a time,
    and such rows sixteen.
    """
    if features.is_cuda and len(weight) >= PAD_FROM and len(weight) % 8:
        return padded_linear(features, weight, bias)
    return F.linear(features, weight, bias)


def padded_linear(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    classes, spare = len(weight), -len(weight) % 8
    if torch.is_autocast_enabled(features.device.type):  # before the copy: half the bytes
        weight = weight.to(torch.get_autocast_dtype(features.device.type))
    bias = None if bias is None else F.pad(bias, (0, spare))
    return F.linear(features, F.pad(weight, (0, 0, 0, spare)), bias)[..., :classes]


class Classes(nn.Linear):
    """The layer that gives the logits [..., K]: `nn.Linear` by `linear`."""

    def forward(self, features: Tensor) -> Tensor:
        return linear(features, self.weight, self.bias)


class UnitLength(nn.Module):
    """Features [..., D] of length `SCALE` each."""

    SCALE = 25.0
    """Logits of a cosine head are between plus and minus this (as in LIFT, arXiv 2309.10019)."""

    def forward(self, features: Tensor) -> Tensor:
        return self.SCALE * F.normalize(features, dim=-1)


class CosineHead(nn.Sequential):
    """`model.head=cosine`: 25 times the cosine of features [..., D] and each class's weights.

    Args:
        exported: with one plain linear layer in place of the one that keeps its rows at length 1,
            into which every method's test rule fits.
    """

    def __init__(self, features: int, num_classes: int, *, exported: bool) -> None:
        last = nn.Linear(features, num_classes) if exported else UnitRows(features, num_classes)
        super().__init__(UnitLength(), last)


class UnitRows(nn.Linear):
    """A linear layer without bias whose weights are used at length 1 for each class."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__(features, num_classes, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return linear(features, F.normalize(self.weight, dim=-1), None)


class MlpHead(nn.Sequential):
    """`model.head=mlp`: features [..., D], D hidden units with GELU, logits [..., K]."""

    def __init__(self, features: int, num_classes: int) -> None:
        hidden, last = nn.Linear(features, features), nn.Linear(features, num_classes)
        super().__init__(hidden, nn.GELU(), last)


def classifier_of(network: nn.Module) -> nn.Module:
    """Everything that comes after the features: the head, with what belongs to it before."""
    whole = (m for m in network.modules() if isinstance(m, MlpHead | CosineHead))
    return next(whole, head_of(network))


class HeadNetwork(nn.Module):
    """A classifier alone, as the network that is trained on cached features [n, D].

    Args:
        scale: what the features are multiplied with first, so that a learning rate fits whatever
            the backbone.
    """

    def __init__(self, classifier: nn.Module, scale: float) -> None:
        super().__init__()
        self.classifier, self.scale = classifier, scale

    def forward(self, features: Tensor) -> Output:
        output: Output = self.classifier(self.scale * features)
        return output

    @torch.no_grad()
    def copy_to(self, classifier: nn.Module) -> None:
        """Give its weights, as they are for features without the scale, to a like classifier."""
        classifier.load_state_dict(self.classifier.state_dict())
        if not isinstance(classifier, CosineHead):  # that takes no notice of it
            first = next(m for m in classifier.modules() if isinstance(m, nn.Linear))
            first.weight.mul_(self.scale)


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
    """Parameters of the head, of LoRA's A and B, and of the method where it has some."""
    parts = [head_of(network), *(m for m in network.children() if isinstance(m, MethodParameters))]
    added = [parameter for _, layer in lora_layers(network) for parameter in (layer.a, layer.b)]
    return [*(parameter for part in parts for parameter in part.parameters()), *added]


@torch.no_grad()
def start_at_zero(network: nn.Module) -> None:
    """Let all logits of a head be 0 at first, in place; the rows of a cosine head have no zero.

    On features of a trained backbone random weights are noise that few labels do not remove: what
    lies outside the span of the labeled features stays as it began (so in BiT and ViT as well).
    """
    head = head_of(network)
    if isinstance(head, nn.Linear) and not isinstance(classifier_of(network), CosineHead):
        for tensor in head.parameters():
            tensor.zero_()


def freeze_backbone(network: nn.Module) -> None:
    """Let only the head, LoRA's A and B and the method's own parameters learn.

    The backbone asks for no gradient, so that without LoRA backward ends at the head, and stays in
    evaluation mode: its batch norms normalise by their running statistics, which stay as they are.
    """
    learning = outside_backbone(network)
    network.requires_grad_(False)
    for parameter in learning:
        parameter.requires_grad_(True)
    head = head_of(network)
    for module in network.modules():
        if not any(part is head for part in module.modules()):
            module.eval()


def frozen_names(network: nn.Module) -> set[str]:
    """Names, in the state dict, of what `freeze_backbone` holds: weights, and buffers beside them.

    Running statistics are such buffers.
    """
    return {
        f"{path}.{name}" if path else name
        for path, module in network.named_modules()
        if (own := dict(module.named_parameters(recurse=False)))
        and not any(parameter.requires_grad for parameter in own.values())
        for name in (*own, *dict(module.named_buffers(recurse=False)))
    }


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
        unit_rows: weights are used at length 1 for each head and class, see `CosineHead`.
    """

    def __init__(
        self,
        features: int,
        num_classes: int,
        *,
        heads: int,
        branches: int = 0,
        with_features: bool,
        unit_rows: bool = False,
    ) -> None:
        super().__init__(features, heads * num_classes, bias=not unit_rows)
        self.heads, self.branches, self.num_classes = heads, branches, num_classes
        self.with_features, self.unit_rows = with_features, unit_rows

    def forward(self, features: Tensor) -> Output:  # type: ignore[override]
        seen = features.unflatten(1, (self.branches, -1)) if self.branches else features
        count = max(1, self.branches) * self.heads
        logits = linear(seen, self.rows(), self.bias)
        if count > 1:
            logits = logits.reshape(len(logits), count, self.num_classes)
        return (logits, seen) if self.with_features else logits

    def logits(self, features: Tensor) -> Tensor:
        """Logits of other features, [..., D] to [..., H, K] or [..., K]."""
        logits = linear(features, self.rows(), self.bias)
        return logits.unflatten(-1, (self.heads, self.num_classes)) if self.heads > 1 else logits

    def rows(self) -> Tensor:
        """The weights [H * K, D] as they are used."""
        return F.normalize(self.weight, dim=-1) if self.unit_rows else self.weight


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


def give_classifier(network: nn.Module, kind: str, *, exported: bool) -> None:
    """Put what `model.head` names in place of the head, in place; weights from torch's CPU
    generator.

    Args:
        kind: linear leaves the weights as they are.
        exported: see `CosineHead`; tools that know layers by their class find torch's own.

    Raises:
        ConfigError: the head is no linear layer and another is asked for.
    """
    if kind != "linear":
        size, old = feature_size(network), head_of(network)
        assert isinstance(old, nn.Linear)
        classes = old.out_features
        cosine = kind == "cosine"
        new = CosineHead(size, classes, exported=exported) if cosine else MlpHead(size, classes)
        _replace(network, old, new)
    if not exported and type(last := head_of(network)) is nn.Linear:
        last.__class__ = Classes  # with its weights, its hooks and its place in the network


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
            size,
            old.out_features,
            heads=heads,
            branches=branches,
            with_features=with_features,
            unit_rows=isinstance(old, UnitRows),
        )
        for block in new.weight.detach().split(old.out_features):
            nn.init.xavier_normal_(block)
    with torch.no_grad():
        new.weight[: old.out_features].copy_(old.weight)
        if new.bias is not None:
            nn.init.zeros_(new.bias)
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
    unit = isinstance(head, UnitRows) or getattr(head, "unit_rows", False)
    rows = F.normalize(head.weight, dim=-1) if unit else head.weight
    weight = rows.unflatten(0, (-1, classes))
    bias = head.weight.new_zeros(weight.shape[:2]) if head.bias is None else head.bias
    branches = next((m for m in network.modules() if isinstance(m, BranchPool)), None)
    if branches is None:
        scale = weight.new_ones(1, head.in_features)
        return weight, bias.view(weight.shape[:2]), scale, torch.zeros_like(scale)
    return weight, bias.view(weight.shape[:2]), *branches.affine()


def plain_copy(network: nn.Module) -> nn.Module:
    """A copy with one linear head, without branches and with LoRA merged: the network that a test
    rule fits into, and that is exported."""
    groups = [group for m in network.modules() if (group := getattr(m, "process_group", None))]
    plain = copy.deepcopy(network, {id(group): group for group in groups})
    head = head_of(plain)
    if isinstance(head, MultiHead | UnitRows):
        classes = head.num_classes if isinstance(head, MultiHead) else head.out_features
        linear = nn.Linear(head.in_features, classes)
        _replace(plain, head, linear.to(head.weight.device, head.weight.dtype))
    for module in list(plain.modules()):
        if isinstance(module, BranchPool):
            _replace(plain, module, nn.AdaptiveAvgPool2d(1))
    merge(plain)
    return plain.eval().requires_grad_(False)


def _replace(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for path, module in list(network.named_modules(remove_duplicate=False)):
        if module is old:
            network.set_submodule(path, new)
