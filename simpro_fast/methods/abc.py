"""ABC: a second classifier that sees as much of every class as of the smallest."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import ABCConfig
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Heads, Needs, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import IGNORED_TARGET

MAIN, BALANCED = 0, 1


class ABC(Method):
    """ABC (Lee et al., NeurIPS 2021): FixMatch, and beside it a head that learns balanced.

    With r_k = N_min / N_k from the labeled counts, the heads A (main) and B (balanced) on the same
    features, u(image) uniform in [0, 1), t the threshold, and e the share of the run's periods that
    are over:

        loss = alpha (mean CE(A(x), y) + mean [u(x) < r_y] CE(B(x), y))
               + mean over all V*N strong rows of [max p_A >= t] CE(A(s), argmax p_A)
               + V times that mean of [max q >= t] [u(w) < 1 - e (1 - r_c)] CE(B(s), q)

    where p_A = softmax(A(w)), q = softmax(B(w)), soft, and c = argmax q. So the unlabeled images
    that B learns from are thinned out by class more and more, from all at the start to r_c at the
    end. Both heads train the backbone. Test: head B.

    Variants: formulas are the same; `paper` has the method's own views, weak labeled ones and two
    strong ones, `released` the common ones. The published numbers come from two strong views, over
    which B's loss is summed while A's is averaged, hence the V above.

    What is not reproduced: the published code takes the logarithm of a softmax, which can be -inf,
    here it is the log-softmax; a view and its image share u here, there is one labeled view there;
    Adam at a constant rate of 0.002 and RandAugment(3, 4) belong to its own protocol, not to the
    common one.

    N_min is the smallest number above 0. A class without labels counts as one with N_min, so its
    pseudo-labels are never thinned out. pi_u counts B's soft pseudo-labels before they are.

    State: the number of periods that are over, equal on all ranks.
    """

    Config: ClassVar[type[ABCConfig]] = ABCConfig
    kept_share: Tensor
    periods_over: Tensor

    @classmethod
    def needs(cls, config: ABCConfig) -> Needs:
        return Needs(heads=2, uniforms=1, confident=True)

    def __init__(self, config: ABCConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        counts = torch.tensor(setting.labeled_counts, dtype=torch.float64)
        smallest = counts[counts > 0].min()
        self.periods = max(1, setting.periods)
        self.register_buffer("kept_share", smallest / counts.clamp_min(smallest), persistent=False)
        self.register_buffer("periods_over", torch.zeros((), dtype=torch.float64))

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        uniform_labeled: Tensor,
        uniform_unlabeled: Tensor,
    ) -> MethodOutput:
        """See `Method.forward`; logits are [rows, 2, K], uniforms [images, 1]."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong, 2)
        targets, weak = self.checked_targets(targets), logits_weak.detach()
        labeled = self._labeled_loss(logits_labeled, targets, uniform_labeled[:, 0])
        plain = pseudo_label_cross_entropy(
            weak[:, MAIN],
            logits_strong[:, MAIN],
            None,
            None,
            self.bound,
            hard=True,
            impl=self.impl,
        )
        balanced = pseudo_label_cross_entropy(
            weak[:, BALANCED],
            logits_strong[:, BALANCED],
            None,
            None,
            self.bound,
            reduction="none",
            impl=self.impl,
        )
        pseudo_labels = weak[:, BALANCED].argmax(1)
        progress = (self.periods_over / self.periods).clamp_max(1)
        share = 1 - progress * (1 - self.kept_share[pseudo_labels])
        drawn = (uniform_unlabeled[:, 0] < share).to(balanced.loss.dtype)
        rows = balanced.loss * drawn.repeat(self.strong_views)
        unlabeled = plain.loss + self.strong_views * rows.sum() / max(1, len(rows))
        return self.counted(
            labeled,
            unlabeled,
            targets,
            balanced.mask,
            pseudo_labels,
            balanced.class_mass,
        )

    def _labeled_loss(self, logits: Tensor, targets: Tensor, uniform: Tensor) -> Tensor:
        """Labeled loss of both heads: a row that is left out is ignored, but counts in the mean."""
        kept = uniform < self.kept_share[targets.clamp(0, self.num_classes - 1)]
        of_heads = torch.stack([targets, torch.where(kept, targets, IGNORED_TARGET)], dim=1)
        rows = adjusted_cross_entropy(
            logits.reshape(-1, self.num_classes),
            of_heads.flatten(),
            None,
            reduction="none",
            impl=self.impl,
        )
        views = len(logits) // max(1, len(targets))
        return rows.sum() / (views * (targets != IGNORED_TARGET).sum()).clamp_min(1)

    @torch.no_grad()
    def confident(self, logits_weak: Tensor) -> Tensor:
        """bool [N]: images that either head may learn from, by a bound lower than rounding."""
        largest = logits_weak.to(prior_dtype(logits_weak)).softmax(2).amax(2)
        return (largest >= self.lower_bound).any(1)

    def end_period(self) -> None:
        super().end_period()
        self.periods_over += 1

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        """Head B."""
        return heads.plain(BALANCED)
