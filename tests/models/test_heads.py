"""Several heads on one network, batch norms side by side, and what they fold into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from simpro_fast.config.schema import ModelConfig
from simpro_fast.methods import Heads
from simpro_fast.models import (
    BranchPool,
    MultiHead,
    build_model,
    classifier_of,
    feature_size,
    head_of,
    plain_copy,
)
from simpro_fast.models.head import Classes, give_classifier, padded_linear
from simpro_fast.training.engine.optim import param_groups
from simpro_fast.utils.errors import ConfigError

NETS = ("small_cnn", "wrn_10_1", "resnet50_3x3", "timm/resnet18")


def build(name: str = "small_cnn", **asked: Any) -> nn.Module:
    return build_model(ModelConfig(name=name), 5, 32, **asked)


def images(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NETS)
def test_first_head_and_backbone_are_those_of_the_plain_network(name: str) -> None:
    plain, wide = build(name), build(name, heads=3, with_features=True)
    head = head_of(wide)
    assert isinstance(head, MultiHead)
    seen: list[torch.Tensor] = []
    head_of(plain).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    logits, features = wide(images())
    assert logits.shape == (6, 3, 5) and features is not None
    torch.testing.assert_close(logits[:, 0], plain(images()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features, seen[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.logits(features), logits, rtol=1e-4, atol=1e-5)
    # The others start from the same spread, and from other numbers.
    blocks = head.weight.detach().unflatten(0, (3, 5))
    assert not torch.equal(blocks[1], blocks[2]) and not head.bias[5:].any()
    expected = (2 / (head.in_features + 5)) ** 0.5
    assert blocks[1].std().item() == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_with_spare_elements_hold_the_same_logits_and_gradients(with_bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    features, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((2, 3, 7), (13, 7), (13,))
    )
    learned = (features, weight, bias) if with_bias else (features, weight)
    target = torch.randn(2, 3, 13, generator=draw, dtype=torch.float64)
    found = []
    for linear in (padded_linear, functional.linear):
        logits = linear(features, weight, bias if with_bias else None)
        gradients = torch.autograd.grad((logits - target).square().sum(), learned)
        found.append((logits, *gradients))
    assert found[0][0].stride() == (48, 16, 1)
    torch.testing.assert_close(*found)
    with torch.autocast("cpu", torch.bfloat16):
        rows = padded_linear(features.float(), weight.float(), bias.float() if with_bias else None)
    assert rows.dtype == torch.bfloat16 and rows.stride() == (48, 16, 1)


@pytest.mark.parametrize("head", ["linear", "mlp", "cosine"])
@pytest.mark.parametrize(
    ("classes", "heads", "stride"),
    [(999, 1, 999), (1000, 1, 1000), (1001, 1, 1008), (127, 1, 127), (505, 2, 1016)],
)
def test_many_classes_get_rows_with_spare_elements_on_a_gpu(
    classes: int, heads: int, stride: int, head: str
) -> None:
    network = build_model(ModelConfig(name="small_cnn", head=head), classes, 32, heads=heads)
    classifier, size = classifier_of(network), feature_size(network)
    on_cpu = classifier(torch.zeros(4, size))
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = classifier.to("cuda")(torch.zeros(4, size, device="cuda"))
    assert logits.shape == on_cpu.shape and logits.shape[-1] == classes
    assert on_cpu.is_contiguous() and logits.stride(0) == stride


@pytest.mark.parametrize("head", ["linear", "mlp", "cosine"])
def test_exported_networks_are_of_torchs_own_layers(head: str) -> None:
    model = ModelConfig(name="timm/resnet18", head=head)
    trained, exported = (build_model(model, 5, 32, exported=e) for e in (False, True))
    assert type(head_of(trained)) is not nn.Linear and type(head_of(exported)) is nn.Linear


@pytest.mark.parametrize("kind", ["mlp", "cosine"])
def test_a_head_under_two_names_is_replaced_under_both(kind: str) -> None:
    network = nn.Module()
    network.body, network.head = nn.Linear(4, 6), nn.Linear(6, 5)
    network.alias = network.head
    give_classifier(network, kind, exported=False)
    assert network.head is network.alias is classifier_of(network)


def test_one_head_changes_nothing() -> None:
    assert type(head_of(build())) is Classes
    assert list(build(with_features=True).state_dict()) == list(build().state_dict())
    single, plain = build(with_features=True), build()
    head = head_of(single)
    assert isinstance(head, MultiHead)
    assert torch.equal(single(images())[0], plain(images()))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", ["small_cnn", "wrn_10_1", "resnet50_3x3"])
def test_branches_are_norms_before_the_pool_and_fold_in_evaluation(name: str, heads: int) -> None:
    network = build(name, heads=heads, branches=3, with_features=True)
    pool = next(m for m in network.modules() if isinstance(m, BranchPool))
    maps: list[torch.Tensor] = []
    pool.register_forward_pre_hook(lambda _, x: maps.append(x[0]))
    for i, norm in enumerate(pool.norms):  # as after some training
        nn.init.uniform_(norm.weight, 0.5, 1.5 + i)
        nn.init.normal_(norm.bias)
    head = head_of(network)
    assert isinstance(head, MultiHead)
    logits, features = network(images())
    assert features is not None and features.shape == (6, 3, head.in_features)
    assert logits.shape == (6, 3 * heads, 5)
    for branch, norm in enumerate(pool.norms):
        values = maps[0]
        mean, var = values.mean((0, 2, 3)), values.var((0, 2, 3), unbiased=False)
        shaped = [t.view(1, -1, 1, 1) for t in (mean, var, norm.weight, norm.bias)]
        normed = (values - shaped[0]) / (shaped[1] + norm.eps).sqrt() * shaped[2] + shaped[3]
        torch.testing.assert_close(features[:, branch], normed.mean((2, 3)), rtol=1e-3, atol=1e-4)

    network.eval()
    with torch.no_grad():
        expected = network(images())[0].unflatten(1, (3, heads))
        scale, shift = pool.affine()
        found = Heads(head.weight.unflatten(0, (heads, 5)), head.bias.view(heads, 5), scale, shift)
        plain = plain_copy(network)
        assert type(head_of(plain)) is nn.Linear
        state = network.state_dict()
        for key, tensor in plain.state_dict().items():
            if state[key].shape == tensor.shape:
                tensor.copy_(state[key])
        for which in range(heads):
            weight, bias = found.plain(which)
            head_of(plain).weight.copy_(weight)
            head_of(plain).bias.copy_(bias)
            wanted = expected[:, :, which].mean(1)
            torch.testing.assert_close(plain(images()), wanted, rtol=1e-3, atol=1e-4)
            weight, bias = found.plain(which, slice(1, 2))
            head_of(plain).weight.copy_(weight)
            head_of(plain).bias.copy_(bias)
            wanted = expected[:, 1, which]
            torch.testing.assert_close(plain(images()), wanted, rtol=1e-3, atol=1e-4)


def test_all_heads_learn_at_the_heads_rate() -> None:
    network = build(heads=3, branches=2)
    groups = param_groups(network, 0.1, 0.2)
    of = {id(p): (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}
    head = head_of(network)
    assert of[id(head.weight)] == (0.1, 1.0) and of[id(head.bias)] == (0.0, 1.0)
    pool = next(m for m in network.modules() if isinstance(m, BranchPool))
    assert {of[id(p)] for p in pool.parameters()} == {(0.0, 0.2)}
    assert len(of) == len(list(network.parameters()))


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("timm/dla34", {"heads": 2}, "one linear layer"),
        ("timm/resnet18", {"branches": 2}, "before the pool"),
    ],
)
def test_networks_that_cannot(name: str, asked: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(name, **asked)
