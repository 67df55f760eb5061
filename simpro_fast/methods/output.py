"""Output of every method for a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MethodOutput:
    """Tensors of one step, all on the logits' device; reading one on the host is the caller's act.

    Only `loss` carries a gradient.
    """

    loss: Tensor
    """[] alpha * loss_labeled + loss_unlabeled; call `backward` on it."""
    loss_labeled: Tensor
    """[] mean over all labeled rows, before alpha; detached."""
    loss_unlabeled: Tensor
    """[] mean over all V*N strong rows, masked rows counting as 0; detached."""
    mask_rate: Tensor
    """[] share of the unlabeled images that pass the threshold, 0 to 1."""
    class_mass: Tensor
    """[K] sum of the kept images' pseudo-labels; each image counts once for any V."""
    mask: Tensor
    """bool [N] images that pass the threshold."""
    pseudo_labels: Tensor
    """int64 [N] most probable class of every weak view, kept or not; lowest index on ties."""


@dataclass(frozen=True)
class PseudoLabels:
    """Pseudo-labels of weak views, without a loss."""

    labels: Tensor
    """int64 [N], the most probable class, kept or not; lowest index on ties."""
    probability: Tensor
    """[N], of that class by the method's rule."""
    kept: Tensor
    """bool [N], whether it would be trained on."""
