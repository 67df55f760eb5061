"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear layers of transformer blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simpro_fast.utils.errors import ConfigError

LAYERS = ("qkv", "q_proj", "k_proj", "v_proj", "proj", "fc1", "fc1_g", "fc1_x", "fc2")
"""Names, within timm's `blocks`, of the linear layers of attention and MLP; EVA has them apart."""


class LoraLinear(nn.Module):
    """A linear layer with weight W + 2 B A, of which A [r, in] and B [out, r] learn.

    A begins as torch begins linear layers (Kaiming uniform), B at zero: at first it is the layer
    that was given, exactly. The factor is alpha / r with alpha = 2 r, the usual choice, whatever
    the rank, so that one learning rate fits all of them; it has no key, since for SGD and AdamW
    alike another factor is another learning rate.

    Args:
        base: the layer W; becomes part of this one.
        rank: r.
    """

    FACTOR = 2.0

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x, self.a), self.b)
        output: Tensor = self.base(x) + self.FACTOR * added
        return output

    @property
    def weight(self) -> Tensor:
        """W + 2 B A, also for networks that apply the weight themselves, as BEiT's attention."""
        return self.base.weight + self.FACTOR * (self.b @ self.a)

    @property
    def bias(self) -> Tensor:
        """The bias of `base`, None where that has none."""
        return self.base.bias


def give_lora(network: nn.Module, name: str, rank: int, seed: int) -> None:
    """Put a `LoraLinear` in place of each linear layer of attention and MLP, in place.

    Args:
        name: `model.name`, for the message.
        seed: decides A alone; torch's global generators are left as they were.

    Raises:
        ConfigError: the network has no such layers.
    """
    found = [
        (path, module)
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and path.rpartition(".")[2] in LAYERS
        and "blocks" in path.split(".")[:-1]
    ]
    if not found:
        raise ConfigError(
            f"model.lora_rank={rank}: model.name={name} has no blocks with linear layers named "
            f"{', '.join(LAYERS)}, as timm's vision transformers have; take one of these, or "
            "model.lora_rank=0"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for path, module in found:
            network.set_submodule(path, LoraLinear(module, rank))


def lora_layers(network: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers that `give_lora` made, by path."""
    return ((p, m) for p, m in network.named_modules() if isinstance(m, LoraLinear))


def merged_state(network: nn.Module) -> dict[str, Tensor]:
    """The network's state, and the weights of its LoRA layers under the names of plain ones."""
    state = dict(network.state_dict())
    for path, layer in lora_layers(network):
        merged = {"weight": layer.weight, "bias": layer.bias}
        state |= {f"{path}.{k}": t.detach() for k, t in merged.items() if t is not None}
    return state


@torch.no_grad()
def merge(network: nn.Module) -> None:
    """Put a plain linear layer with the weight W + 2 B A in place of each LoRA layer, in place."""
    for path, layer in list(lora_layers(network)):
        layer.base.weight.copy_(layer.weight)
        network.set_submodule(path, layer.base)
