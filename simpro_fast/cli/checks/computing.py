"""The kernels of this machine against their references."""

from __future__ import annotations

from collections.abc import Callable

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from simpro_kernels.dispatch import choose

from simpro_fast.cli.checks.table import Line
from simpro_fast.distributed.process_group import Ranks

# Rounding of float32 sums over a thousand classes stays far below this.
_TOLERANCE = 1e-4


def check_kernels(ranks: Ranks) -> Line:
    """Both loss kernels as `impl=auto` runs them, loss and gradient, against float64 references."""
    worst = 0.0
    for classes in (10, 1000):
        for kernel in (_pseudo, _adjusted):
            worst = max(worst, _error(kernel, classes, ranks.device))
    probe = torch.zeros(1, 10, device=ranks.device)
    impl = choose("pseudo_label_cross_entropy", "auto", probe)
    text = (
        f"impl={impl} on {ranks.device.type}: losses and gradients within {worst:.0e} "
        "of the float64 reference"
    )
    if not worst < _TOLERANCE:
        cure = "set method.impl=eager, and please report this table as an issue"
        return Line("problem", text, cure)
    return Line("ok", text)


def _error(
    kernel: Callable[[torch.Tensor, str], torch.Tensor], classes: int, device: torch.device
) -> float:
    """Largest error of loss and gradient, relative to the largest value of the reference."""
    generator = torch.Generator().manual_seed(classes)
    logits = 4 * torch.randn(96, classes, generator=generator)
    results = []
    for given, impl in ((logits.to(device), "auto"), (logits.double(), "eager")):
        given.requires_grad_()
        loss = kernel(given, impl)
        (gradient,) = torch.autograd.grad(loss, given)
        results.append(torch.cat([loss.reshape(1), gradient.flatten()]).detach().cpu().double())
    ours, reference = results
    return float((ours - reference).abs().max() / reference.abs().max())


def _pseudo(logits: torch.Tensor, impl: str) -> torch.Tensor:
    weak, strong = logits[:32].detach(), logits[32:]
    prior = torch.linspace(-1, 1, logits.shape[1], device=logits.device)
    return pseudo_label_cross_entropy(weak, strong, prior, prior.flip(0), 0.3, impl=impl).loss


def _adjusted(logits: torch.Tensor, impl: str) -> torch.Tensor:
    targets = torch.arange(48, device=logits.device) % logits.shape[1]
    prior = torch.linspace(-1, 1, logits.shape[1], device=logits.device)
    return adjusted_cross_entropy(logits, targets, prior, impl=impl)
