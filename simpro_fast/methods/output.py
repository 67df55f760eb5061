"""Output of every method for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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

    @staticmethod
    def joined(outputs: Sequence[MethodOutput]) -> MethodOutput:
        """The output of a whole batch, images in its order, from those of its micro-batches.

        These are of one size, so that means over them are means over the batch. The result of
        several carries no gradient; a single one is returned as it is.
        """
        if len(outputs) == 1:
            return outputs[0]

        def mean(name: str) -> Tensor:
            return torch.stack([getattr(out, name).detach() for out in outputs]).mean(0)

        return MethodOutput(
            loss=mean("loss"),
            loss_labeled=mean("loss_labeled"),
            loss_unlabeled=mean("loss_unlabeled"),
            mask_rate=mean("mask_rate"),
            class_mass=torch.stack([out.class_mass for out in outputs]).sum(0),
            mask=torch.cat([out.mask for out in outputs]),
            pseudo_labels=torch.cat([out.pseudo_labels for out in outputs]),
        )


@dataclass(frozen=True)
class PseudoLabels:
    """Pseudo-labels of weak views, without a loss."""

    labels: Tensor
    """int64 [N], the most probable class, kept or not; lowest index on ties."""
    probability: Tensor
    """[N], of that class by the method's rule."""
    kept: Tensor
    """bool [N], whether it would be trained on."""
