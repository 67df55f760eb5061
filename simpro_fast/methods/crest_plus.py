"""CReST+: generations, each with more images of rare classes among the labeled ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from simpro_fast.config.methods import CReSTPlusConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import common
from simpro_fast.methods.needs import Change, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.pseudo_label import PseudoLabelMethod
from simpro_fast.utils.errors import ConfigError

ALIGN_FLOOR = 1e-6


class CReSTPlus(PseudoLabelMethod):
    """CReST+ on FixMatch (Wei et al., CVPR 2021).

    The run is divided into G generations of equal length, g = 0 .. G - 1. Each trains a fresh
    network, with its learning rate and average from the start, by FixMatch with distribution
    alignment. With pi_l the labeled shares, p the mean softmax(f(w)) of the last `window` steps
    (uniform before there were any), and no gradient through q:

        t_g    = 1 - (1 - align_min) g / (G - 1)
        target = pi_l^t_g, normalised
        q      = softmax(f(w)) (target + 1e-6) / (p + 1e-6), normalised
        loss   = alpha * mean CE(f(x), y) + mean over all V*N strong rows of
                 [max q >= threshold] CE(f(s), argmax q)

    At the end of a generation the averaged network labels all unlabeled images, not augmented. Of
    the n_k that it gives to class k, floor(n_k (N_mirrored / N_1)^(1 / rate_root)) of the highest
    probability join the labeled images, in place of those that joined before; N_1 is the count of
    the most frequent labeled class, and the mirror of the r-th is the r-th from the end. So nearly
    all of a rare class join and few of a frequent one. Classes are ranked by labeled count, equal
    ones by index, in whatever order they are numbered. With `align=false` q is softmax(f(w)), which
    is CReST. Test: the head as it is.

    Variants: `released` follows the port to FixMatch in the code of DASO, from which the numbers in
    long-tailed papers come: the window is empty at first, and p goes on from one generation to the
    next. In `paper`, the method's own code, a generation begins with a window of uniform ones, and
    there is a weak labeled view and one strong one.

    What is not reproduced: the port's p has the predictions of the same step in it, here they count
    from the next one on, in both variants, as in the method's own code (other ranks' are not known
    before); pi_l is counted, not taken from the exponential law; the schedule, rate and weight
    decay of either code belong to its own protocol. Where the unlabeled list holds the labeled
    images (`data.overlap`), these may join once more; the published code leaves them out.

    A class without labels counts as one with a single image.

    State: the predictions of the window, equal on all ranks; those of a step are summed. More
    generations than periods would leave some without a step, so that is an error.
    """

    Config: ClassVar[type[CReSTPlusConfig]] = CReSTPlusConfig
    rank_counts = (*PseudoLabelMethod.rank_counts, "predicted")
    prior: Tensor
    recent: Tensor

    def __init__(self, config: CReSTPlusConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting), hard=True)
        self.generations, self.periods = config.generations, setting.periods
        # One more than the whole ones: the last period of a run may be cut short.
        if self.generations > self.periods + 1:
            raise ConfigError(
                f"method.generations={self.generations}: the run has {self.periods} periods, and "
                "each generation needs one; set fewer, or more train.steps"
            )
        self.align, self.align_min = config.align, config.align_min
        self.rate_root = config.rate_root
        prior = labeled_prior(setting.labeled_counts)
        self.register_buffer("prior", prior, persistent=False)
        uniform = torch.full_like(prior, 1 / len(prior)).repeat(config.window, 1)
        empty = self.variant == "released"
        self.register_buffer("recent", torch.zeros_like(uniform) if empty else uniform)
        self.predicted = torch.zeros_like(prior)

    def adjustments(self, dtype: torch.dtype) -> tuple[Tensor | None, None]:
        """log of (target + 1e-6) / (p + 1e-6) for the weak views."""
        if not self.align:
            return None, None
        share = self.phase / max(1, self.generations - 1)
        target = self.prior.pow(1 - share * (1 - self.align_min))
        total = self.recent.sum(0)  # each row there is sums to 1
        mean = torch.where(total.any(), total / total.sum().clamp_min(1), 1 / len(total))
        ratio = (target / target.sum() + ALIGN_FLOOR) / (mean + ALIGN_FLOOR)
        return ratio.log().to(dtype), None

    def forward(
        self, logits_labeled: Tensor, targets: Tensor, logits_weak: Tensor, logits_strong: Tensor
    ) -> MethodOutput:
        """See `Method.forward`."""
        out = super().forward(logits_labeled, targets, logits_weak, logits_strong)
        if self.training:
            self.predicted += logits_weak.detach().to(self.predicted.dtype).softmax(1).sum(0)
        return out

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """All ranks' mean prediction takes the place of the oldest one."""
        total = self.over_ranks(self.predicted)
        self.recent[step % len(self.recent)] = total / total.sum()
        self.predicted.zero_()

    def phase_at(self, period: int) -> int:
        """The generation."""
        return max(g for g in range(self.generations) if self._start(g) <= period)

    def span_at(self, period: int) -> tuple[int, int]:
        """Each generation has a course of its own."""
        generation = self.phase_at(period)
        last = generation == self.generations - 1
        return self._start(generation), self.periods if last else self._start(generation + 1)

    def _start(self, generation: int) -> int:
        """Its first period."""
        if self.generations > self.periods:
            return generation
        return generation * self.periods // self.generations

    def enter_phase(self, phase: int, tools: PhaseTools) -> Change:
        if self.variant == "paper":
            self.recent.fill_(1 / self.num_classes)
        chosen = self.select(tools.logits("unlabeled"))
        return Change(fresh_network=True, pseudo_labeled=chosen)

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [P] rows and [P] labels of float [M, K] that join the labeled images, class by
        class, the highest probability first."""
        confidence, label = logits.double().softmax(1).max(1)
        by_rank = self.prior.cpu().argsort(descending=True, stable=True)
        mirrored = torch.empty_like(by_rank)
        mirrored[by_rank] = by_rank.flip(0)
        prior = self.prior.cpu()
        rates = (prior[mirrored] / prior.max()).pow(1 / self.rate_root).tolist()
        order = confidence.argsort(descending=True, stable=True)
        chosen = []
        for k, rate in enumerate(rates):
            of_class = order[label[order] == k]
            # Rounding must not take one image from a rate of 1.
            chosen.append(of_class[: int(len(of_class) * rate + 1e-9)])
        rows = torch.cat(chosen)
        return rows, label[rows]
