"""ADELLO: alignment to a class distribution that shifts over training, and distillation."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor

from simpro_fast.config.methods import ADELLOConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import PRIOR_FLOOR


class ADELLO(Method):
    """ADELLO (Sanchez Aimar et al., ECCV 2024), whose alignment is called FlexDA.

    p is the estimate of the unlabeled distribution: after every step it moves by
    p <- d p + (1 - d) mean softmax(f(w)), from uniform shares. With t of T steps done,
    a_t = 1 - (1 - power_min) (t / T)^2 and Q ~ p^a_t, the network is trained towards p at first
    and towards a nearly uniform distribution at the end. pi_l are the labeled shares:

        loss = alpha mean CE(f(x) + log pi_l - log Q, y)
               + mean over all V*N strong rows of [m CE(f(s) + log p - log Q, argmax f(w))]
               + mean over the same rows of [(1 - m) CE(f(s) / T_d + log p - log Q, r)]

    with m = [max softmax(f(w)) >= threshold] and r = softmax(f(w) / T_d). The third term begins
    after `distill_after` of the run's periods; T_d = exp(KL(p || uniform)) is fixed then. Test: the
    head as it is.

    The published runs distill after 50,000 of 262,144 steps on CIFAR-100, from the beginning on
    STL-10; B 64, mu 2. Written from the paper's formulas. p moves after the step here, so that
    ranks agree on it. A class without labels counts as one with a single image. Variants are alike.

    State, equal on all ranks: p, t and T_d.
    """

    Config: ClassVar[type[ADELLOConfig]] = ADELLOConfig
    rank_counts = (*Method.rank_counts, "predicted")
    prior: Tensor
    p: Tensor
    progress: Tensor
    temperature: Tensor

    def __init__(self, config: ADELLOConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.decay, self.power_min = config.estimate_decay, config.power_min
        self.distill_from = config.distill_after * setting.periods
        self.steps = max(1, setting.period * setting.periods)
        prior = labeled_prior(setting.labeled_counts)
        self.register_buffer("prior", prior, persistent=False)
        self.register_buffer("p", torch.full_like(prior, 1 / len(prior)))
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        self.predicted = torch.zeros_like(prior)
        self.given = setting.prior is not None
        if setting.prior is not None:
            self.p.copy_(torch.tensor(setting.prior, dtype=torch.float64).clamp_min(PRIOR_FLOOR))

    def forward(
        self, logits_labeled: Tensor, targets: Tensor, logits_weak: Tensor, logits_strong: Tensor
    ) -> MethodOutput:
        """See `Method.forward`."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets, weak = self.checked_targets(targets), logits_weak.detach()
        dtype = prior_dtype(weak)
        power = 1 - (1 - self.power_min) * self.progress**2
        log_p = self.p.clamp_min(PRIOR_FLOOR).log()
        log_q = (power * log_p).log_softmax(0)
        shift = (log_p - log_q).to(dtype)
        labeled = adjusted_cross_entropy(
            logits_labeled, targets, (self.prior.log() - log_q).to(dtype), impl=self.impl
        )
        sure = pseudo_label_cross_entropy(
            weak, logits_strong, None, shift, self.bound, hard=True, impl=self.impl
        )
        unlabeled = sure.loss
        if self.phase:
            unlabeled = unlabeled + self._distilled(weak, logits_strong, shift, ~sure.mask)
        if self.training:
            self.predicted.add_(weak.to(dtype).softmax(1).sum(0))
        return self.counted(labeled, unlabeled, targets, sure.mask, weak.argmax(1), sure.class_mass)

    def _distilled(self, weak: Tensor, strong: Tensor, shift: Tensor, unsure: Tensor) -> Tensor:
        """The third term, of images that are not sure: bool [N]."""
        temperature = self.temperature.to(shift.dtype)
        soft = (weak / temperature).softmax(1).repeat(self.strong_views, 1)
        rows = -(soft * (strong / temperature + shift).log_softmax(1)).sum(1)
        return (rows * unsure.repeat(self.strong_views)).mean()

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        seen = self.over_ranks(self.predicted)
        if not self.given:
            self.p.lerp_(seen / seen.sum(), 1 - self.decay)
        self.predicted.zero_()
        self.progress.fill_(min(1.0, (step + 1) / self.steps))

    def phase_at(self, period: int) -> int:
        """0 without distillation, then 1."""
        return int(period >= self.distill_from)

    @torch.no_grad()
    def enter_phase(self, phase: int, tools: PhaseTools) -> None:
        p = self.p / self.p.sum()
        self.temperature.copy_((p * (p * len(p)).clamp_min(1e-12).log()).sum().exp())

    def normalised_pi_u(self) -> Tensor:
        """p, float64 [K]: the estimate that training follows."""
        return self.p / self.p.sum()
