"""impl="compile": the eager twin through torch.compile gives what the twin gives."""

import math
import shutil

import pytest
import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a compiler"
    ),
]


def test_numbers_and_special_values(device: torch.device) -> None:
    weak = torch.zeros(6, 5)
    weak[:, 1] = 20.0
    weak[1, 3] = math.nan
    weak[2, 1] = 0.0
    weak[3] = -math.inf
    strong = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    strong[2, 0] = math.nan
    strong[4, 2] = -math.inf
    strong[5, 1] = -math.inf
    weak, strong = weak.to(device), strong.to(device)
    targets = torch.tensor([1, 0, -100, 9, 4, 2], device=device)
    results = []
    for impl in ("eager", "compile"):
        z = strong.clone().requires_grad_()
        out = pseudo_label_cross_entropy(weak, z, None, None, 0.9, reduction="none", impl=impl)
        labeled = adjusted_cross_entropy(z, targets, None, reduction="none", impl=impl)
        (out.loss + labeled).sum().backward()
        results.append([*out, labeled, z.grad])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, equal_nan=True, rtol=1e-5, atol=1e-6)
