"""SimPro: simple probabilistic pseudo-labels under an unknown unlabeled class distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

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
        labeled_weight: of a labeled image in phi, where a kept unlabeled one has 1, as published.
        prior_rows: "all": masked images count for pi_u as well (Saerens et al., 2002).
        prior: shares of the unlabeled classes, length K, that pi_u is from the first step on; None:
            it is estimated.
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
        labeled_weight: float = 1.0,
        prior_rows: Literal["kept", "all"] = "kept",
        prior: Sequence[float] | None = None,
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
        if not labeled_weight > 0:
            raise ValueError(f"labeled_weight must be positive, got {labeled_weight}")
        if prior_rows not in ("kept", "all"):
            raise ValueError(f"prior_rows must be 'kept' or 'all', got {prior_rows!r}")
        self.tau = tau
        self.adjust_pseudo_labels = adjust_pseudo_labels
        self.adjust_loss = adjust_loss
        self.labeled_weight = labeled_weight
        # Part of the state only where it is used: other checkpoints stay as they were.
        with torch.inference_mode(False):
            self.all_mass = torch.zeros_like(self.pi_u) if prior_rows == "all" else None
            if self.all_mass is not None:
                self.rank_counts = (*type(self).rank_counts, "all_mass")
            if prior is not None:
                self.pi_u.copy_(torch.as_tensor(prior, dtype=torch.float64) / sum(prior))
        self.given = prior is not None

    @classmethod
    def build(cls, config: Any, setting: Setting) -> SimPro:
        own = {key: getattr(config, key) for key in cls.Config.own_keys()}
        in_loss = own.pop("phi_counts") == "loss"
        own["labeled_weight"] = setting.alpha * setting.mu if in_loss else 1.0
        own["prior"] = setting.prior
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

    @torch.no_grad()
    def count_all(self, scores: Tensor) -> None:
        if self.all_mass is not None:
            self.all_mass.add_(scores.softmax(1).sum(0))

    def prior_mass(self, unlabeled: Tensor) -> Tensor:
        return unlabeled if self.all_mass is None else self.over_ranks(self.all_mass)

    @property
    def pi_u_stays(self) -> bool:
        return self.given

    def update_priors(self) -> None:
        super().update_priors()
        if self.all_mass is not None:
            self.all_mass.zero_()

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, tau={self.tau}, "
            f"adjust_pseudo_labels={self.adjust_pseudo_labels}, adjust_loss={self.adjust_loss}"
        )
