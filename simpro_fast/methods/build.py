"""Methods from the configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from simpro_fast.config.schema import MethodConfig
from simpro_fast.errors import ConfigError
from simpro_fast.methods.base import PseudoLabelMethod
from simpro_fast.methods.fixmatch import FixMatch
from simpro_fast.methods.simpro import SimPro


def resolve_alpha(
    method: MethodConfig,
    num_labeled: int,
    num_unlabeled: int,
    batch_size: int,
    mu: int,
) -> float:
    """The weight of the labeled loss, from the sizes of the whole sets and the global batch.

    `auto` is for SimPro the number of labeled batches over that of unlabeled ones: with recipe
    "released" floor(N / B) / floor(M / (mu B)), each at least 1; with "paper" mu N / M. FixMatch
    weighs both losses alike, so there it is 1. `alpha_max` caps the result, a given number too.

    Args:
        method: alpha, alpha_max, recipe, name.
        num_labeled, num_unlabeled: images in the sets (N, M).
        batch_size: labeled images per step over all ranks (B).
        mu: unlabeled images per labeled one.

    Raises:
        ConfigError: an empty set where `auto` needs its size.
    """
    if not isinstance(method.alpha, str):
        alpha = method.alpha
    elif method.name == "fixmatch":
        alpha = 1.0
    elif num_labeled < 1 or num_unlabeled < 1:
        raise ConfigError(
            f"method.alpha=auto needs images in both sets, got {num_labeled} labeled and "
            f"{num_unlabeled} unlabeled; set method.alpha to a number"
        )
    elif method.recipe == "released":
        labeled_batches = max(1, num_labeled // batch_size)
        alpha = labeled_batches / max(1, num_unlabeled // (mu * batch_size))
    else:
        alpha = mu * num_labeled / num_unlabeled
    return alpha if method.alpha_max is None else min(alpha, method.alpha_max)


def build_method(
    method: MethodConfig,
    labeled_counts: Sequence[int],
    *,
    alpha: float,
    strong_views: int,
    process_group: dist.ProcessGroup | None = None,
) -> PseudoLabelMethod:
    """The method `method.name` on the CPU; move it to the logits' device.

    Args:
        method: the section of the configuration.
        labeled_counts: images per class of the labeled set.
        alpha: from `resolve_alpha`.
        strong_views: V.
        process_group: ranks whose class counts are summed; None: all.
    """
    if method.name == "simpro":
        return SimPro(
            labeled_counts,
            method.tau,
            method.threshold,
            method.momentum,
            alpha,
            strong_views,
            recipe=method.recipe,
            hard=bool(method.hard),
            adjust_pseudo_labels=method.adjust_pseudo_labels,
            adjust_loss=method.adjust_loss,
            impl=method.impl,
            process_group=process_group,
        )
    return FixMatch(
        labeled_counts,
        method.threshold,
        method.momentum,
        alpha,
        strong_views,
        recipe=method.recipe,
        hard=method.hard is not False,
        impl=method.impl,
        process_group=process_group,
    )
