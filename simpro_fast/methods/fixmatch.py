"""FixMatch, the baseline without class priors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from simpro_fast.config.methods import FixMatchConfig
from simpro_fast.methods.base import Impl, common
from simpro_fast.methods.needs import Setting
from simpro_fast.methods.priors import Variant
from simpro_fast.methods.pseudo_label import PseudoLabelMethod


class FixMatch(PseudoLabelMethod):
    """FixMatch (NeurIPS 2020): pseudo-label argmax f(w(u)), kept where its softmax >= threshold.

        loss = alpha * mean CE(f(x), y) + mean over all V*N strong rows of kept * CE(f(s(u)), q)

    The published method has alpha = 1 and V = 1. pi_u and phi are tracked as in SimPro, so that
    runs can be compared, but enter nothing.

    Args:
        labeled_counts: images per class of the labeled set, length K.
        threshold: in probability; above 1 masks every image.
        momentum: of the two priors, in [0, 1).
        alpha: weight of the labeled loss.
        strong_views: V, strong views per unlabeled image.
        variant: normaliser of the tracked pi_u, see `PriorTracker`.
        hard: False trains on the soft pseudo-labels.
        impl: kernel implementation, "auto", "triton", "eager" or "compile".
        process_group: ranks whose class counts are summed; None: all.
    """

    Config: ClassVar[type[FixMatchConfig]] = FixMatchConfig

    def __init__(
        self,
        labeled_counts: Sequence[int] | Tensor,
        threshold: float = 0.95,
        momentum: float = 0.9,
        alpha: float = 1.0,
        strong_views: int = 1,
        *,
        variant: Variant = "released",
        hard: bool = True,
        impl: Impl = "auto",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            labeled_counts,
            threshold,
            momentum,
            alpha,
            strong_views,
            variant=variant,
            hard=hard,
            impl=impl,
            process_group=process_group,
        )

    @classmethod
    def build(cls, config: Any, setting: Setting) -> FixMatch:
        return cls(**common(config, setting), hard=config.hard)

    def adjustments(self, dtype: torch.dtype) -> tuple[None, None]:
        """None: FixMatch takes the logits as they are."""
        return None, None
