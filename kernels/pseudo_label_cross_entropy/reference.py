"""The eager twin of the kernel: plain PyTorch, any device, the test oracle in float64.

On CUDA it runs with impl="eager" and, compiled, "compile"; "auto" takes the Triton kernels.

Legend: N images, V strong views, K classes.
"""

import torch
from simpro_kernels.checks import accumulation_dtype
from torch import Tensor


def pseudo_label_cross_entropy(
    logits_weak: Tensor,  # [N, K]
    logits_strong: Tensor,  # [V*N, K]
    log_prior_weak: Tensor | None,  # [K]
    log_prior_strong: Tensor | None,  # [K]
    threshold: float | Tensor,
    hard: bool,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, class mass [K], mask [N] and max_prob [N]; see ``op.py`` for the meaning of each."""
    num_images, num_classes = logits_weak.shape
    num_views = logits_strong.shape[0] // num_images if num_images else 1
    target, mask, max_prob = pseudo_labels(logits_weak, log_prior_weak, threshold, hard)
    class_mass = torch.where(mask[:, None], target, 0.0).sum(0)

    # Masked rows become constants before any arithmetic, so that a NaN there reaches neither the
    # loss nor (as 0 * NaN) the gradient. An invalid weak row has NaN targets and goes through: its
    # loss and gradient are NaN instead of vanishing.
    counted = mask | max_prob.isnan()
    strong = logits_strong.reshape(num_views, num_images, num_classes)
    strong = torch.where(counted[:, None], strong.to(target.dtype), 0.0)
    if log_prior_strong is not None:
        strong = strong + log_prior_strong.to(target.dtype)
    shifted, log_normaliser = shift_and_log_normaliser(strong)
    # A class without target mass costs 0, also where its logit is -inf.
    cross_entropy = log_normaliser - torch.where(target == 0, 0.0, target * shifted).sum(-1)
    rows = torch.where(counted, cross_entropy, 0.0).reshape(num_views * num_images)
    if reduction == "none":
        return rows, class_mass, mask, max_prob
    return rows.sum() / max(rows.shape[0], 1), class_mass, mask, max_prob


@torch.no_grad()
def pseudo_labels(
    logits_weak: Tensor, log_prior: Tensor | None, threshold: float | Tensor, hard: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Targets [N, K], mask [N] and max_prob [N]; an invalid row has NaN in both numbers."""
    dtype = accumulation_dtype(logits_weak)
    weak = logits_weak.to(dtype)
    if log_prior is not None:
        weak = weak + log_prior.to(dtype)
    top = weak.amax(1, keepdim=True)
    exp = (weak - top).exp()
    normaliser = exp.sum(1, keepdim=True)
    # The largest exponential is exp(0) = 1. NaN, +inf and all -inf make the normaliser NaN.
    max_prob = normaliser.reciprocal().squeeze(1)
    mask = max_prob.float() >= bound_of(threshold, weak.device)
    if not hard:
        return exp / normaliser, mask, max_prob
    classes = torch.arange(weak.shape[1], device=weak.device)
    # torch.argmax leaves the choice among ties open; this takes the lowest index.
    label = torch.where(weak == top, classes, weak.shape[1]).amin(1, keepdim=True)
    target = torch.where(normaliser.isnan(), torch.nan, (classes == label).to(dtype))
    return target, mask, max_prob


def bound_of(threshold: float | Tensor, device: torch.device) -> Tensor:
    """The threshold as float32 [], in which probabilities are compared."""
    if isinstance(threshold, Tensor):
        return threshold.float()
    return torch.full((), threshold, dtype=torch.float32, device=device)


def shift_and_log_normaliser(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``logits - max`` and ``log(sum(exp(logits - max)))`` over the last axis.

    The maximum is a constant for autograd: the derivative of max + log(sum(exp(x - max))) does
    not depend on it. For a row of -inf it is taken as 0, which leaves -inf in both results.
    """
    top = logits.detach().amax(-1, keepdim=True)
    shifted = logits - torch.where(top == -torch.inf, 0.0, top)
    return shifted, shifted.exp().sum(-1).log()
