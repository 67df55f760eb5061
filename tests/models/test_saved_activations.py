"""What a step keeps and casts: no activation twice, no weight more than once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpro_fast.config.schema import ModelConfig
from simpro_fast.models import build_model
from tests.models.test_models import unfused


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 of each of some tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.casts = {tensor.data_ptr(): 0 for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.overloadpacket is torch.ops.aten._to_copy:
            pointer = args[0].data_ptr()
            if (kwargs or {}).get("dtype") == torch.bfloat16 and pointer in self.casts:
                self.casts[pointer] += 1
        return function(*args, **(kwargs or {}))


def network(name: str) -> nn.Module:
    model = build_model(ModelConfig(name=name), 10, 16)
    return model.to(memory_format=torch.channels_last)


def images() -> Tensor:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["wrn_10_2", "resnet50_3x3"])
def test_autocast_casts_a_weight_once_a_step(name: str) -> None:
    """The backward pass uses what the forward pass has cast; batch norm takes float32 weights."""
    model = network(name)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with Casts([*matrices, *vectors]) as mode:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images())
        logits.float().square().sum().backward()
    assert [mode.casts[p.data_ptr()] for p in matrices] == [1] * len(matrices)
    assert not any(mode.casts[p.data_ptr()] for p in vectors)


def kept_bytes(model: nn.Module) -> int:
    """Bytes that the forward pass keeps for the backward one, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)  # its address must not be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images())
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "share"), [("wrn_28_2", 0.75), ("small_cnn", 0.75), ("resnet50_3x3", 1.0)]
)
def test_fused_layers_keep_less(name: str, share: float) -> None:
    """Convolutions and batch norms keep their inputs; separate layers with a leaky ReLU also what
    lies between norm and activation (torch's ReLU keeps its result)."""
    fused = network(name)
    separate = unfused(copy.deepcopy(fused))
    assert kept_bytes(fused) <= share * kept_bytes(separate)
