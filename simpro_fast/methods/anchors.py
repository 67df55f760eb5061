"""Three guesses of an unknown class distribution, and how far an estimate is from each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simpro_fast.methods.priors import PRIOR_FLOOR

NAMES = ("consistent", "uniform", "reversed")


def labeled_prior(labeled_counts: Sequence[int] | Tensor) -> Tensor:
    """Class shares of the labeled set, float64 [K]; a class without images counts as one image, the
    smallest number that can be seen, so that no logarithm of it decides everything."""
    counts = torch.as_tensor(labeled_counts, dtype=torch.float64).clamp_min(1)
    return counts / counts.sum()


def anchors(prior: Tensor) -> Tensor:
    """The labeled distribution, the uniform and the reversed one, float64 [3, K].

    Reversed by rank: the class that is r-th of the labeled set has the share of the r-th from the
    end, whatever the order of the classes. With classes from head to tail it is the flipped vector.
    """
    order = prior.argsort(descending=True, stable=True)
    turned = torch.empty_like(prior)
    turned[order] = prior[order.flip(0)]
    return torch.stack([prior, torch.full_like(prior, 1 / len(prior)), turned])


def symmetric_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) / 2 + KL(q || p) / 2 over the last dimension, in nats; shares floored at 1e-12."""
    p, q = (x.clamp_min(PRIOR_FLOOR) for x in (p, q))
    return ((p - q) * (p.log() - q.log())).sum(-1) / 2
