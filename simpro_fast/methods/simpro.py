"""SimPro: simple probabilistic pseudo-labels under an unknown unlabeled class distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from simpro_fast.config.methods import SimProConfig
from simpro_fast.methods.base import Impl, common
from simpro_fast.methods.needs import Setting
from simpro_fast.methods.priors import Variant, log_prior
from simpro_fast.methods.pseudo_label import PseudoLabelMethod


class SimPro(PseudoLabelMethod):
    """SimPro (ICML 2024, Algorithm 1) as a module for any training loop.

    With a(p) the floored tau * log p, f the logits, w and s the weak and strong views:

        E step:  q = softmax(f(w(u)) + a(pi_u)), kept where max q >= threshold
        M step:  loss = alpha * mean CE(f(x) + a(phi), y)
                      + mean over all V*N strong rows of kept * CE(f(s(u)) + a(phi), q)

    and after every period `update_priors()` moves pi_u and phi (see `PriorTracker`). At test time
    use argmax f(x), without adjustment.

    Args:
        labeled_counts: images per class of the labeled set, length K.
        tau: strength of both adjustments.
        threshold: in probability; above 1 masks every image.
        momentum: of pi_u and phi, in [0, 1).
        alpha: weight of the labeled loss; `resolve_alpha` gives the paper's.
        strong_views: V, strong views per unlabeled image.
        variant: "released" or "paper": floors and normaliser of the priors. The released code also
            trains on weak and strong labeled views; here L is what `logits_labeled` holds.
        hard: one-hot pseudo-labels in place of soft ones.
        adjust_pseudo_labels: False removes a(pi_u) (ablation without E step).
        adjust_loss: False removes a(phi) from both losses (ablation without M step).
        impl: kernel implementation, "auto", "triton", "eager" or "compile".
        process_group: ranks whose class counts are summed; None: all.
    """

    Config: ClassVar[type[SimProConfig]] = SimProConfig

    def __init__(
        self,
        labeled_counts: Sequence[int] | Tensor,
        tau: float = 2.0,
        threshold: float = 0.95,
        momentum: float = 0.9,
        alpha: float = 1.0,
        strong_views: int = 2,
        *,
        variant: Variant = "released",
        hard: bool = False,
        adjust_pseudo_labels: bool = True,
        adjust_loss: bool = True,
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
        if tau < 0:
            raise ValueError(f"tau must not be negative, got {tau}")
        self.tau = tau
        self.adjust_pseudo_labels = adjust_pseudo_labels
        self.adjust_loss = adjust_loss

    @classmethod
    def build(cls, config: Any, setting: Setting) -> SimPro:
        own = {key: getattr(config, key) for key in cls.Config.own_keys()}
        return cls(**common(config, setting), **own)

    @property
    def loss_tau(self) -> float:
        """tau; 0 without `adjust_loss`."""
        return self.tau if self.adjust_loss else 0.0

    def adjustments(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """tau * log pi_u and tau * log phi, floored by the variant; None where switched off."""
        weak = strong = None
        if self.adjust_pseudo_labels:
            weak = log_prior(self.pi_u, self.tau, self.variant).to(dtype)
        if self.adjust_loss:
            strong = log_prior(self.phi, self.tau, self.variant).to(dtype)
        return weak, strong

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, tau={self.tau}, "
            f"adjust_pseudo_labels={self.adjust_pseudo_labels}, adjust_loss={self.adjust_loss}"
        )
