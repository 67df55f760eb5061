"""ACR: adaptive consistency regularisation, and its form without anchors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import ACRConfig, ACRNoAnchorsConfig
from simpro_fast.methods.anchors import anchors, labeled_prior, symmetric_kl
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Heads, Needs, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput

A, B = 0, 1


class ACR(Method):
    """ACR (Wei and Gan, CVPR 2023): two heads whose pseudo-labels are adjusted by how far the
    unlabeled distribution is from the labeled one.

    With pi_l the labeled shares, x labeled, w and s weak and strong views of unlabeled images, t
    the threshold, and all targets and masks from w without gradient:

        loss = alpha (CE(A(x), y) + CE(B(x) + tau_loss log pi_l, y)) + L_A + L_B
        L_h  = mean over all V*N strong rows of m_h CE(h(s), y_h), y_h hard
        y_A  = argmax A - tau_t log pi_l      m_A = max softmax(A - tau_t log pi_l) >= t
                                                    or max softmax(A) >= t
        y_B  = argmax A - tau_balanced log pi_l
        m_B  = max softmax(A - tau_balanced log pi_l) >= t or max softmax(B) >= t

    The estimate u of the unlabeled distribution starts uniform. After period `estimate_after` it
    moves in every step by u <- decay u + (1 - decay) v, v the classes that B gives to the images it
    is sure of (max softmax(B) >= t). Over a period D_a is the mean symmetrised KL of u to the
    labeled, the uniform and the reversed distribution, and the next one has

        tau_t = tau exp(D_labeled) / (exp(D_labeled) + exp(D_uniform) + exp(D_reversed)),

    in the first such period tau / 3, before it tau. Test: head B as it is.

    Variants: `paper`, the default, counts in v how many images a class has. `released` has the
    published code's v, which is filled by an indexed addition that keeps the last write: a class is
    present if B is sure of the last image of the step that it gives to the class, so that u leans
    towards uniform and tau_t to the middle. The published numbers come from that. A step without a
    class in v moves neither u nor the distances.

    Not taken over: pi_l counted from one pass over the labeled loader without its last batch (here
    all images); labeled images in an overlapping unlabeled list left out of v (here they count, the
    protocol's lists are disjoint). A class without labeled images counts as one with a single one.

    State, equal on all ranks: u, the sums of D and tau_t; v is summed over ranks in every step.
    """

    Config: ClassVar[type[ACRConfig]] = ACRConfig
    rank_counts = (*Method.rank_counts, "sure")
    prior: Tensor
    anchors: Tensor
    u: Tensor
    distance: Tensor
    tau_target: Tensor

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(heads=2, confident=True)

    def __init__(self, config: ACRConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.tau, self.decay = config.tau, config.estimate_decay
        self.tau_balanced, self.tau_loss = config.tau_balanced, config.tau_loss
        self.estimate_after, self.period = config.estimate_after, setting.period
        prior = labeled_prior(setting.labeled_counts)
        self.register_buffer("prior", prior, persistent=False)
        self.register_buffer("anchors", anchors(prior), persistent=False)
        self.register_buffer("u", torch.full_like(prior, 1 / len(prior)))
        self.register_buffer("distance", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("tau_target", torch.tensor(self.tau, dtype=torch.float64))
        self.sure = torch.zeros_like(prior)
        self.given = setting.prior is not None
        if setting.prior is not None:
            self.u.copy_(torch.tensor(setting.prior, dtype=torch.float64))
            self.distance.copy_(self.period * symmetric_kl(self.u, self.anchors))
            self._adapt()

    def forward(
        self, logits_labeled: Tensor, targets: Tensor, logits_weak: Tensor, logits_strong: Tensor
    ) -> MethodOutput:
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong, 2)
        targets, classes = self.checked_targets(targets), self.num_classes
        dtype = prior_dtype(logits_weak)
        log_prior = self.prior.log()
        balance = torch.stack([0 * log_prior, self.tau_loss * log_prior]).to(dtype)
        # Rows of both heads in one launch: row (l b + i) 2 + head belongs to target 2 i + head.
        labeled = 2 * adjusted_cross_entropy(
            (logits_labeled + balance).reshape(-1, classes),
            targets.repeat_interleave(2),
            None,
            impl=self.impl,
        )
        pseudo_labels, masks = self._targets(logits_weak.detach(), self.bound)
        rows = self.masked_cross_entropy(logits_strong, pseudo_labels, masks)
        unlabeled = 2 * rows.mean()
        mask, given = masks[:, B], pseudo_labels[:, B]
        if self.training:
            confidence, best = logits_weak[:, B].detach().to(dtype).softmax(1).max(1)
            self._count(best, confidence >= self.bound)
        return self.counted(labeled, unlabeled, targets, mask, given)

    def _count(self, best: Tensor, sure: Tensor) -> None:
        """Note in `self.sure` the classes int64 [N] that B gives, and bool [N] where it is sure.

        Images by class; `released`: of each class 2 if B is sure of its last image, 1 if not, 0 if
        it has none.
        """
        if self.variant == "paper":
            self.sure.index_add_(0, best, sure.to(self.sure.dtype))
            return
        places = torch.arange(1, len(best) + 1, device=best.device)
        last = torch.zeros_like(self.sure, dtype=torch.int64)
        last.scatter_reduce_(0, best, places, "amax")
        said = 1 + sure[(last - 1).clamp_min(0)].to(self.sure.dtype)
        self.sure.copy_(torch.where(last > 0, said, self.sure))

    def _seen(self) -> Tensor:
        """v times its sum, of all ranks: float64 [K]."""
        if self.variant == "paper":
            return self.over_ranks(self.sure)
        ranks = self.from_ranks(self.sure[None])
        order = torch.arange(1, len(ranks) + 1, device=ranks.device)[:, None]
        last = ((ranks > 0) * order).argmax(0, keepdim=True)
        return (ranks.gather(0, last)[0] == 2).to(ranks.dtype)

    def _targets(self, logits_weak: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Pseudo-labels int64 [N, 2] and masks bool [N, 2] of both heads."""
        dtype = prior_dtype(logits_weak)
        plain, balanced = logits_weak.to(dtype).unbind(1)
        log_prior = self.prior.log()
        for_a = plain - (self.tau_target * log_prior).to(dtype)
        for_b = plain - (self.tau_balanced * log_prior).to(dtype)
        scores = torch.stack([for_a, for_b, plain, balanced], dim=1)
        sure = scores.softmax(2).max(2).values >= bound
        return scores[:, :2].argmax(2), sure[:, :2] | sure[:, 2:]

    @torch.no_grad()
    def confident(self, logits_weak: Tensor) -> Tensor:
        """bool [N]: images that either head learns from, by a bound lower than rounding."""
        return self._targets(logits_weak, self.lower_bound)[1].any(1)

    def phase_at(self, period: int) -> int:
        """0 before u is estimated, or where it is given, then 1."""
        return int(period > self.estimate_after and not self.given)

    def enter_phase(self, phase: int, tools: PhaseTools) -> None:
        self._adapt()

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        if self.phase:
            seen = self._seen()
            total = seen.sum()
            moved = self.u.lerp(seen / total.clamp_min(1), 1 - self.decay)
            self.u.copy_(torch.where(total > 0, moved, self.u))
            self.distance += (total > 0) * symmetric_kl(self.u, self.anchors)
        self.sure.zero_()

    def end_period(self) -> None:
        super().end_period()
        if self.phase:
            self._adapt()

    @torch.no_grad()
    def _adapt(self) -> None:
        """tau_t of the next period, from the distances of the last one (none: tau / 3)."""
        self.tau_target.copy_(self.tau * (self.distance / self.period).softmax(0)[0])
        self.distance.zero_()

    def normalised_pi_u(self) -> Tensor:
        """u, float64 [K]: the estimate that training follows."""
        return self.u / self.u.sum()

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        return heads.plain(B)


class ACRNoAnchors(ACR):
    """ACR without anchors (in the SimPro paper: ACR with a dagger): tau_t stays tau.

    So the pseudo-labels of both heads are corrected as if the unlabeled distribution were balanced
    or reversed, whatever it is. u is still estimated and logged, and changes nothing.

    The published numbers (SimPro paper) come from code whose unlabeled CIFAR and ImageNet-1k lists
    hold the labeled images as well, and whose ImageNet-127 priors are those of other classes.
    """

    Config: ClassVar[type[ACRConfig]] = ACRNoAnchorsConfig

    def _adapt(self) -> None:
        self.distance.zero_()
