import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from simpro_fast.config.schema import ModelConfig
from simpro_fast.models import build_model, list_models
from simpro_fast.models.layers import NormAct, PixelConv, with_zeros
from simpro_fast.utils.errors import ConfigError


def build(name: str, *, num_classes: int = 10, size: int = 32, seed: int = 1, **keys) -> nn.Module:
    return build_model(ModelConfig(name=name, **keys), num_classes, size, seed=seed)


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


@pytest.mark.parametrize("name", ["wrn_10_1", "wrn_16_2", "small_cnn"])
@pytest.mark.parametrize("size", [8, 28, 33])
def test_logits_have_one_column_per_class(name, size):
    assert build(name, num_classes=7, size=size)(torch.randn(2, 3, size, size)).shape == (2, 7)


@pytest.mark.parametrize("kernel", [3, 7])
def test_a_channel_of_zeros_changes_nothing(kernel):
    conv = PixelConv(3, 8, kernel, 2, kernel // 2, bias=False).double()
    conv = conv.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 17, 17, dtype=torch.float64).to(memory_format=torch.channels_last)
    found = []
    for run in (conv, lambda x: with_zeros(conv, x)):
        y = run(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), conv.weight)
        assert y.is_contiguous(memory_format=torch.channels_last)
        found.append((y, gradient))
    torch.testing.assert_close(*found)


def test_pixels_on_a_gpu_have_four_channels():
    seen = []
    with FakeTensorMode(), CountChannels(seen):
        PixelConv(3, 8, 3, device="cuda")(torch.empty(2, 3, 8, 8, device="cuda"))
    assert seen == [(4, 4)]
    assert isinstance(build("wrn_10_1").stem, PixelConv)
    assert isinstance(build("resnet50").conv1, PixelConv)


class CountChannels(TorchDispatchMode):
    """Input channels of x and of the weights, of every convolution."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket.__name__ == "convolution":
            self.seen.append((arguments[0].shape[1], arguments[1].shape[1]))
        return function(*arguments, **(options or {}))


def test_wrn_28_2_has_the_published_layers():
    model = build("wrn_28_2")
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    # 1 stem, 3 stages of 4 blocks with 2 convolutions, 3 shortcuts where the width changes.
    assert len(convs) == 1 + 24 + 3
    assert [c.weight.shape[0] for c in convs if c.kernel_size == (1, 1)] == [32, 64, 128]
    assert [c.stride for c in convs if c.kernel_size == (1, 1)] == [(1, 1), (2, 2), (2, 2)]
    # The published count is 1,467,610 with the two dead batch norms of 32 and 64 channels.
    assert sum(p.numel() for p in model.parameters()) == 1_467_610 - 2 * (32 + 64)
    full = build("wrn_28_2", skip_quirk=False)
    assert sum(p.numel() for p in full.parameters()) == 1_467_610
    assert {m.eps for m in batch_norms(model)} == {1e-5}


@pytest.mark.parametrize("skip_quirk", [True, False])
def test_every_parameter_gets_a_gradient(skip_quirk):
    model = build("wrn_10_2", skip_quirk=skip_quirk)
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_quirk_feeds_the_raw_input_to_both_paths_of_a_widening_block():
    block = build("wrn_10_2").stages[1][0].eval()
    x = torch.randn(3, 32, 8, 8)
    expected = block.shortcut(x) + block.conv2(block.bn2(block.conv1(x)))
    assert torch.equal(block(x), expected)
    without = build("wrn_10_2", skip_quirk=False).stages[1][0].eval()
    active = without.bn1(x)
    expected = without.shortcut(x) + without.conv2(without.bn2(without.conv1(active)))
    assert torch.equal(without(x), expected)


def test_first_block_activates_once_for_both_paths():
    block = build("wrn_10_2").stages[0][0].eval()
    x = torch.randn(3, 16, 8, 8)
    active = block.bn1(x)
    expected = block.shortcut(active) + block.conv2(block.bn2(block.conv1(active)))
    assert torch.equal(block(x), expected)


def test_batch_norm_momentum_is_the_networks_own_unless_set():
    assert {m.momentum for m in batch_norms(build("wrn_10_1"))} == {0.001}
    assert {m.momentum for m in batch_norms(build("small_cnn"))} == {0.1}
    for name in ("wrn_10_1", "small_cnn"):
        assert {m.momentum for m in batch_norms(build(name, bn_momentum=0.01))} == {0.01}


def test_initialisation_depends_on_the_seed_only_and_leaves_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build("small_cnn", seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = build("small_cnn", seed=3).state_dict(), build("small_cnn", seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["features.0.weight"], other["features.0.weight"])


def test_initial_weights_have_the_stated_spread():
    model = build("wrn_10_4")
    conv = model.stages[2][0].conv2
    fan_out = 256 * 9
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(math.sqrt(2 / (256 + 10)), rel=0.05)
    assert not model.head.bias.any()


ACTIVATIONS = {
    "leaky_relu": nn.LeakyReLU(0.1),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "none": nn.Identity(),
}


class Unfused(nn.Module):
    """The layers that a fused one stands for."""

    def __init__(self, fused: NormAct) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(fused.num_features, momentum=fused.momentum)
        self.norm.load_state_dict(fused.state_dict())
        self.activation = ACTIVATIONS[fused.activation]
        self.to(fused.weight.dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.norm(x)
        return self.activation(out if residual is None else out + residual)


def unfused(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        setattr(model, name, Unfused(child) if isinstance(child, NormAct) else unfused(child))
    return model


@pytest.mark.parametrize("activation", ["leaky_relu", "relu", "silu"])
def test_activation_is_used_everywhere(activation):
    for name in ("wrn_10_1", "small_cnn"):
        found = [m.activation for m in batch_norms(build(name, activation=activation))]
        assert found == [activation] * len(found) and found


@pytest.mark.parametrize(
    ("name", "activation"), [("wrn_10_2", None), ("small_cnn", "silu"), ("resnet50_3x3", None)]
)
def test_fused_layers_are_batch_norm_sum_and_activation(name, activation):
    """Logits, every gradient and every running statistic, in float64 and channels_last."""
    fused = build(name, activation=activation).double()
    plain = unfused(copy.deepcopy(fused))
    names = [key.replace(".norm.", ".") for key in plain.state_dict()]
    assert names == list(fused.state_dict())
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for model in (fused, plain):
        logits = model(x.contiguous(memory_format=torch.channels_last))
        logits.square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters()), *model.buffers()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smal_cnn", "did you mean 'small_cnn'"),
        ("torchvision/resnet18", "did you mean 'timm/resnet18'"),
        ("hal9000", "is unknown; Valid: small_cnn"),
        ("wrn_27_2", "nearest is wrn_22_2"),
        ("wrn_4_2", "nearest is wrn_10_2"),
        ("wrn_28_0", "nearest is wrn_28_1"),
    ],
)
def test_wrong_names_are_errors_with_the_nearest(name, expected):
    with pytest.raises(ConfigError, match=expected):
        build(name)


def test_tiny_images_are_an_error():
    with pytest.raises(ConfigError, match=r"data\.image_size=4"):
        build("small_cnn", size=4)


def test_all_listed_models_build():
    for name in list_models():
        assert isinstance(build(name), nn.Module)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet50_starts_with_the_head_of_the_released_code():
    head = build("resnet50_3x3", num_classes=127, size=32).fc
    assert not head.bias.any()
    assert float(head.weight.detach().std()) == pytest.approx((2 / (2048 + 127)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("name", "size", "side", "stem", "gflop"),
    [("resnet50_3x3", 32, 32, 1728, 2.596), ("resnet50", 64, 16, 9408, 0.671)],
)
def test_resnet50_layers(name, size, side, stem, gflop):
    model = build(name, num_classes=1000, size=size, activation="relu")
    body = 23_508_032 - 9408  # torchvision's ResNet-50 without its head and stem
    assert parameters(model) == body + stem + 2048 * 1000 + 1000
    # The published small net counts 24.0 M with 127 classes and two heads that never train,
    # a second classifier and a 4-way one.
    dead_heads = (2048 * 127 + 127) + (2048 * 4 + 4)
    few = build(name, num_classes=127, size=size)
    if name == "resnet50_3x3":
        assert parameters(few) + dead_heads == 24_028_994
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 1 + 3 * 16 + 4
    sides = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda _, __, out: sides.append(tuple(out.shape[1:])))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.randn(1, 3, size, size))
    assert sides == [(256 * 2**i, side // 2**i, side // 2**i) for i in range(4)]
    assert counter.get_total_flops() / 1e9 == pytest.approx(gflop, rel=0.002)


def test_activation_is_the_networks_own_unless_set():
    for name, activation in (
        ("wrn_10_1", "leaky_relu"),
        ("resnet50", "relu"),
        ("small_cnn", "leaky_relu"),
    ):
        # Without one: the batch norms of ResNet-50's shortcuts.
        assert {m.activation for m in batch_norms(build(name))} - {"none"} == {activation}


def test_names_in_the_state_dict_are_those_of_separate_layers():
    """Checkpoints and exported models of networks with activations as layers load."""
    names = list(build("small_cnn").state_dict())
    convs = [f"features.{3 * i}.weight" for i in range(6)]
    assert [name for name in names if name in convs] == convs
    assert [n for n in names if n.startswith("features.1.")] == [
        f"features.1.{n}" for n in nn.BatchNorm2d(1).state_dict()
    ]


@pytest.mark.parametrize("name", list_models())
def test_real_networks_train_on_a_batch_of_two(name):
    model = build(name, num_classes=127, size=32)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 127)
    nn.functional.cross_entropy(logits, torch.tensor([0, 126])).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() > 1)


def test_resnet50_is_torchvisions():
    reference = pytest.importorskip("torchvision").models.resnet50(num_classes=11).eval()
    model = build("resnet50", num_classes=11, size=64, activation="relu").eval()
    assert model.load_state_dict(reference.state_dict()).missing_keys == []
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), reference(x))


def test_resnet50_initialisation():
    model = build("resnet50_3x3")
    conv = model.layer3[1].conv2
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.02)
    assert {m.momentum for m in batch_norms(model)} == {0.1}
    assert {m.eps for m in batch_norms(model)} == {1e-5}
