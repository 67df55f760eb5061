"""Data and comparisons of the kernel tests.

The three-way rule: the kernel may be as far from float64 as the eager twin is, plus a tolerance.
Both see the same logits (rounded to their dtype before), so the loss is held to float32 accuracy
in every dtype; only the stored gradient is rounded to it.
"""

from dataclasses import dataclass

import torch
from simpro_kernels import PseudoLabelLoss, dispatch, pseudo_label_cross_entropy
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_TOLERANCE = 1e-5
# Two roundings to the dtype: at the store, and after the incoming gradient is applied. Triton's
# interpreter cuts float32 off to bfloat16 instead of rounding it.
GRADIENT_TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 1.5e-3,
    torch.bfloat16: 16e-3 if dispatch.INTERPRETED else 8e-3,
}


@dataclass(frozen=True)
class Case:
    num_images: int
    num_classes: int
    num_views: int = 2
    dtype: str = "fp32"
    tau: float = 1.0
    hard: bool = False
    reduction: str = "mean"

    def __str__(self) -> str:
        target = "hard" if self.hard else "soft"
        return (
            f"N{self.num_images}-K{self.num_classes}-V{self.num_views}-{self.dtype}-"
            f"tau{self.tau:g}-{target}-{self.reduction}"
        )


@dataclass(frozen=True)
class Inputs:
    weak: Tensor
    strong: Tensor
    prior_weak: Tensor | None
    prior_strong: Tensor | None
    threshold: float
    incoming: Tensor
    """The gradient that reaches the loss: not 1, and per row for reduction "none"."""


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Rows from undecided to certain; the threshold keeps about half of them."""
    generator = torch.Generator().manual_seed(seed + 7919 * case.num_images + case.num_classes)
    draw = {"generator": generator, "dtype": torch.float64}
    shape = (case.num_images, case.num_classes)
    weak = torch.randn(*shape, **draw)
    if case.num_images:
        certainty = torch.rand(case.num_images, **draw) * 12
        favourite = torch.randint(case.num_classes, (case.num_images,), generator=generator)
        weak[torch.arange(case.num_images), favourite] += certainty
    strong = 2 * torch.randn(case.num_views * shape[0], shape[1], **draw)
    dtype = DTYPES[case.dtype]
    weak, strong = weak.to(dtype), strong.to(dtype)
    prior_weak = prior_strong = None
    if case.tau:
        prior_weak = (case.tau * torch.randn(shape[1], **draw).log_softmax(0)).float()
        prior_strong = (case.tau * torch.randn(shape[1], **draw).log_softmax(0)).float()
    rows = case.num_views * case.num_images
    incoming = torch.randn(() if case.reduction == "mean" else (rows,), **draw).float()
    max_prob = pseudo_label_cross_entropy(
        weak.double(), strong.double(), prior_weak, prior_strong, 0.5, impl="eager"
    ).max_prob
    tensors = [weak, strong, prior_weak, prior_strong]
    weak, strong, prior_weak, prior_strong = (None if t is None else t.to(device) for t in tensors)
    assert weak is not None and strong is not None
    return Inputs(weak, strong, prior_weak, prior_strong, separating(max_prob), incoming.to(device))


def separating(max_prob: Tensor) -> float:
    """A threshold in the widest gap of the middle half: rows stay 1e-5 away from it."""
    if len(max_prob) < 2 or max_prob.min() == max_prob.max():
        return 0.3
    ordered = max_prob.sort().values
    low, high = len(ordered) // 4, max(3 * len(ordered) // 4, len(ordered) // 4 + 1)
    gaps = ordered[low + 1 : high + 1] - ordered[low:high]
    at = low + int(gaps.argmax())
    assert ordered[at + 1] - ordered[at] > 2e-5
    return float(ordered[at] + ordered[at + 1]) / 2


def run_pseudo(case: Case, inputs: Inputs, impl: str) -> tuple[PseudoLabelLoss, Tensor]:
    """Result and gradient; impl "fp64" is the eager twin on float64 copies."""
    dtype = torch.float64 if impl == "fp64" else inputs.strong.dtype
    strong = inputs.strong.to(dtype).clone().requires_grad_()
    out = pseudo_label_cross_entropy(
        inputs.weak.to(dtype),
        strong,
        inputs.prior_weak,
        inputs.prior_strong,
        inputs.threshold,
        hard=case.hard,
        reduction=case.reduction,
        impl="eager" if impl == "fp64" else impl,
    )
    (out.loss * inputs.incoming.to(out.loss.dtype)).sum().backward()
    assert strong.grad is not None
    return out, strong.grad


def assert_three_way(name: str, kernel: Tensor, eager: Tensor, exact: Tensor, rtol: float) -> None:
    """|kernel - exact| <= |eager - exact| + rtol * (|exact| + floor), element by element.

    The floor is the largest value of the tensor in float32 accuracy: what a difference of two
    probabilities of that size can lose.
    """
    assert kernel.shape == exact.shape, f"{name}: shape {list(kernel.shape)}"
    if exact.numel() == 0:
        return
    kernel, eager = kernel.detach().double(), eager.detach().double()
    exact = exact.detach().double()
    assert torch.isfinite(kernel).all(), f"{name}: not finite"
    floor = 1e-6 * exact.abs().max()
    allowed = (eager - exact).abs() + rtol * exact.abs() + floor + 1e-7
    excess = (kernel - exact).abs() - allowed
    worst = int(excess.argmax())
    assert excess.max() <= 0, (
        f"{name}: at flat index {worst} kernel {kernel.flatten()[worst]:.9g}, "
        f"eager {eager.flatten()[worst]:.9g}, float64 {exact.flatten()[worst]:.9g}"
    )
