"""Public operations in one traced graph of CUDA tensors, as torch.compile takes them on a GPU.

The tensors are fake, so that no device is needed: branches that only CUDA tensors take are traced.
"""

from collections.abc import Callable
from typing import Any

import pytest
import simpro_kernels
import torch
from simpro_kernels import (
    AdjustedCrossEntropy,
    BatchNormAct,
    PseudoLabelCrossEntropy,
    adjusted_cross_entropy,
    batch_norm_act,
    pseudo_label_cross_entropy,
)
from torch._subclasses.fake_tensor import FakeTensorMode

FAKE = FakeTensorMode(allow_non_fake_inputs=True)


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    with FAKE:
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=dtype.is_floating_point)


def logits_and_prior() -> tuple[Any, ...]:
    return cuda(32, 10), cuda(64, 10), cuda(10, dtype=torch.float32).detach()


def labeled() -> tuple[Any, ...]:
    prior = cuda(10, dtype=torch.float32).detach()
    return cuda(32, 10), cuda(32, dtype=torch.int64), prior


def pictures() -> tuple[Any, ...]:
    x = cuda(4, 16, 8, 8).to(memory_format=torch.channels_last)
    return x, *(cuda(16, dtype=torch.float32).detach() for _ in range(4))


def module(made: torch.nn.Module) -> torch.nn.Module:
    with FAKE:
        return made.to("cuda")


# Operation to (function, its inputs).
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "pseudo_label_cross_entropy": (
        lambda weak, strong, prior: pseudo_label_cross_entropy(
            weak, strong, prior, prior, 0.95, impl="triton"
        ),
        logits_and_prior,
    ),
    "PseudoLabelCrossEntropy": (PseudoLabelCrossEntropy(0.95, impl="triton"), logits_and_prior),
    "adjusted_cross_entropy": (
        lambda *given: adjusted_cross_entropy(*given, impl="triton"),
        labeled,
    ),
    "AdjustedCrossEntropy": (AdjustedCrossEntropy(impl="triton"), labeled),
    "batch_norm_act": (
        lambda x, mean, var, weight, bias: batch_norm_act(
            x, mean, var, weight, bias, training=True, residual=x, impl="triton"
        ),
        pictures,
    ),
    "BatchNormAct": (BatchNormAct(16, impl="triton"), lambda: pictures()[:1]),
}
# A result, and a function that plans on the host and is called by the data pipeline.
NOT_TRACED = {"PseudoLabelLoss", "augment_views"}


@pytest.mark.parametrize("name", sorted(set(simpro_kernels.__all__) - NOT_TRACED))
def test_is_one_graph_with_the_kernel_inside(name: str) -> None:
    function, inputs = CASES[name]
    if isinstance(function, torch.nn.Module):
        function = module(function)
    torch._dynamo.reset()
    graph, _ = torch._dynamo.export(function)(*inputs())
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    if "djusted" in name or "adjusted" in name:  # torch's own operations
        return
    assert any(target.startswith("simpro_kernels.") for target in called), called
