"""CPE: three experts, each for another class distribution of the unlabeled images."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import CPEConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Heads, Needs, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.utils.errors import ConfigError

EXPERTS = BRANCHES = 3
PREDICTS = 1
"""The expert of the test rule: the one that is trained to be balanced."""


class CPE(Method):
    """CPE, complementary experts (Ma et al., AAAI 2024).

    Three batch norms side by side on the last feature map, for all (H), medium and tail (M) and
    tail classes (T), each pooled; three linear experts, each applied to all three features. With
    f_e the mean of an expert's logits over the branches, f_eb those on branch b, pi_l the labeled
    shares, t the threshold, tau_e of `taus`, and targets from the weak view without gradient:

        loss = sum over e of alpha * mean CE(f_e(x) + tau_e log pi_l, y) + U_e
        y_e  = argmax f_e(w), kept where max softmax(f_e(w)) >= t
        U_e  = 1/n sum over the strong views with y_e kept of CE(f_eH(s), y_e)
               + [y_e medium or tail] CE(f_eM(s), y_e) + [y_e tail] CE(f_eT(s), y_e)

    with n all V*N strong views or, with `mean_over=terms`, the cross entropies in the sum plus
    1e-12. Test: the mean logits of the second expert, as they are.

    Medium and tail are ranks among the classes by labeled count, equal counts by index, so classes
    may come in any order. A class without labels counts as one with a single one in pi_l.

    Variants: formulas are the same; `paper` has the method's own views, a weak labeled one and one
    strong one, `released` the common ones. The published code, from which the numbers come, divides
    by the terms. A rank or micro-batch knows only its own number of them, so that a run then
    depends on how its batch is split. `mean_over=images`, where it does not, is the default; the
    shipped experiments set `terms`.

    What is not reproduced: the branches' batch norms have the momentum of the network's others (0.1
    there); RandAugment(3) at continuous strengths with a cutout of random size, and the best test
    accuracy of all evaluations, belong to its own protocol. The running estimates of the published
    code only log.

    pi_u counts the kept pseudo-labels of the second expert. State: none of its own.
    """

    Config: ClassVar[type[CPEConfig]] = CPEConfig
    balance: Tensor
    branches_of: Tensor

    @classmethod
    def needs(cls, config: CPEConfig) -> Needs:
        return Needs(heads=EXPERTS, branches=BRANCHES, confident=True)

    def __init__(self, config: CPEConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        classes, self.mean_over = setting.num_classes, config.mean_over
        medium, tail = config.cuts or (35 * classes // 100, 70 * classes // 100)
        if tail > classes:
            raise ConfigError(
                f"method.cuts=[{medium}, {tail}]: there are {classes} classes; give the ranks at "
                "which medium and tail classes begin"
            )
        counts = torch.tensor(setting.labeled_counts)
        rank = counts.argsort(descending=True, stable=True).argsort()
        branches_of = 1 + (rank >= medium).long() + (rank >= tail).long()
        taus = torch.tensor(config.taus, dtype=torch.float64)
        balance = taus[:, None] * labeled_prior(counts).log()
        self.register_buffer("branches_of", branches_of, persistent=False)
        self.register_buffer("balance", balance, persistent=False)

    def forward(
        self, logits_labeled: Tensor, targets: Tensor, logits_weak: Tensor, logits_strong: Tensor
    ) -> MethodOutput:
        """See `Method.forward`; logits are [rows, branches * experts, K]."""
        heads = EXPERTS * BRANCHES
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong, heads)
        targets, dtype = self.checked_targets(targets), prior_dtype(logits_weak)
        # All experts in one launch: row (l b + i) E + e belongs to target i E + e.
        labeled = EXPERTS * adjusted_cross_entropy(
            (_expert_logits(logits_labeled) + self.balance.to(dtype)).reshape(-1, self.num_classes),
            targets.repeat_interleave(EXPERTS),
            None,
            impl=self.impl,
        )
        confidence, given = _expert_logits(logits_weak.detach()).softmax(2).max(2)
        kept = confidence >= self.bound
        branch = torch.arange(BRANCHES, device=given.device)
        # [N, branches, experts]
        used = kept[:, None] & (branch[:, None] < self.branches_of[given][:, None])
        rows = self.masked_cross_entropy(logits_strong, given[:, None], used)
        of_expert = rows.view(-1, BRANCHES, EXPERTS).sum((0, 1))
        if self.mean_over == "terms":
            unlabeled = of_expert / (self.strong_views * used.sum((0, 1)) + 1e-12)
        else:
            unlabeled = of_expert / max(1, len(logits_strong))
        unlabeled = unlabeled.sum()
        mask, pseudo_labels = kept[:, PREDICTS], given[:, PREDICTS]
        return self.counted(labeled, unlabeled, targets, mask, pseudo_labels)

    @torch.no_grad()
    def confident(self, logits_weak: Tensor) -> Tensor:
        """bool [N]: images that some expert learns from, by a bound lower than rounding."""
        largest = _expert_logits(logits_weak).softmax(2).amax(2)
        return (largest >= self.lower_bound).any(1)

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        """The mean of the second expert over the branches."""
        return heads.plain(PREDICTS)


def _expert_logits(logits: Tensor) -> Tensor:
    """Means over the branches, [rows, B * E, K] to [rows, E, K], in float32 or float64."""
    return logits.to(prior_dtype(logits)).unflatten(1, (BRANCHES, EXPERTS)).mean(1)
