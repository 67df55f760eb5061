"""The network that a run is judged by and leaves behind: the average under the method's rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simpro_fast.methods import Heads, Method
from simpro_fast.models import BranchPool, MultiHead, head_of, plain_copy


class Predictor:
    """The averaged network with one plain linear head, by which the method predicts.

    For a method with one head and no rule of its own it is the averaged network itself.
    """

    def __init__(self, method: Method, average: nn.Module) -> None:
        self._method, self._average = method, average
        own_rule = type(method).test_head is not Method.test_head
        needed = own_rule or isinstance(head_of(average), MultiHead)
        self._plain = plain_copy(average) if needed else None

    @torch.no_grad()
    def network(self) -> nn.Module:
        """float [n, 3, H, W] to logits [n, K], of the weights as they are now; evaluation mode."""
        if self._plain is None:
            return self._average
        head = head_of(self._average)
        assert isinstance(head, nn.Linear)
        heads = _heads(self._average, head, self._method.num_classes)
        weight, bias = self._method.test_head(heads, self._average) or heads.plain(0)
        state, own = self._average.state_dict(), head_of(self._plain)
        for name, tensor in self._plain.state_dict(keep_vars=True).items():
            if tensor is not own.weight and tensor is not own.bias:
                tensor.copy_(state[name])
        assert isinstance(own, nn.Linear)
        own.weight.copy_(weight)
        own.bias.copy_(bias)
        return self._plain

    def state_dict(self) -> dict[str, Tensor]:
        return self.network().state_dict()


def _heads(network: nn.Module, head: nn.Linear, classes: int) -> Heads:
    weight = head.weight.unflatten(0, (-1, classes))
    bias = head.weight.new_zeros(weight.shape[:2]) if head.bias is None else head.bias
    branches = next((m for m in network.modules() if isinstance(m, BranchPool)), None)
    if branches is None:
        scale = weight.new_ones(1, head.in_features)
        shift = torch.zeros_like(scale)
    else:
        scale, shift = branches.affine()
    return Heads(weight, bias.view(weight.shape[:2]), scale, shift)
