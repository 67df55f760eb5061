"""CPG: unlabeled images join the labeled ones when their pseudo-labels have proved stable."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor
from torch.nn.functional import normalize

from simpro_fast.config.methods import CPGConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Change, Needs, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import IGNORED_TARGET
from simpro_fast.methods.step_rows import StepRows

MAIN, AUXILIARY = 0, 1
SURE = 0.9
"""Share of the threshold that a view must reach to vote."""
AGREE = 0.8
"""Share of an image's votes above which its label is accepted."""


class CPG(Method):
    """CPG, controllable pseudo-label generation, as far as it is known.

    The authors' code could not be read, only a copy that others have built upon. What that does not
    say was chosen here, and is marked (ours); so numbers of it are not those of the authors.

    Two heads on the same features, A (main) and B (auxiliary). The labeled list is at first that of
    the run, later with accepted unlabeled images; pi_cur are its class shares, n_k its counts,
    pi_sel the shares of the accepted images (uniform before there are any, and never below the
    smallest number above 0). With y' the one-hot label, of which `smoothing` is spread evenly:

        loss = alpha (C + mean CE(B(x) + log pi_cur, y))
               + mean over all V*N strong rows of CE(B(s), softmax(B(w)))
        C    = mean (CE(A(x) + log pi_cur, y') + c_y CE(A'(x) + log pi_cur, y'))
               / sum_k pi_cur_k (1 + c_k)

    where A' is A on noisy features z + r_y e * z / |z|, with e normal, c_k = floor(copies * n_ref /
    n_k) and n_ref the count that is (K/3)-th from the smallest; r_k = noise over the mean cosine of
    the class's labeled features to their mean. One noisy copy of weight c_k stands for c_k of them,
    and the divisor is the mean number of copies, so that training does not depend on how the batch
    is split (ours). C has its second term once r_k is known, after `warmup` (ours).

    From the period `warmup` on, an unlabeled image votes for class k whenever it is drawn, if
    softmax(A + log pi_sel) of its weak view and of its first strong view both have their largest
    value there, and both reach 0.9 threshold. After every `window` periods those with more than
    `min_votes` votes of which more than 80 percent agree join the labeled list, in place of those
    that joined before, and voting begins anew. Test: head A as it is.

    Variants: formulas are the same; `paper` has the method's own views, a weak labeled one and one
    strong one (ours), `released` the common ones.

    What is not reproduced: accepted images have their most voted class as their label, there the
    share of each class among their votes; epochs of 1024 steps, augmentation and the network of its
    own protocol. Not known, and chosen here (ours): that A sees the noisy features and not B, and
    that B's targets are soft.

    A class without labeled images counts as one with a single one in pi_cur. mask and pi_u are of
    the images that vote, or would.

    State, equal on all ranks, which collect the votes of all: 4 M K bytes of votes, the class
    counts and r. Votes are whole numbers, so their order does not matter.
    """

    Config: ClassVar[type[CPGConfig]] = CPGConfig
    votes: Tensor
    own_counts: Tensor
    counts: Tensor
    selected: Tensor
    spread: Tensor

    @classmethod
    def needs(cls, config: CPGConfig) -> Needs:
        return Needs(
            heads=2, features=("labeled",), positions=("unlabeled",), head=True, uniforms=2
        )

    def __init__(self, config: CPGConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.warmup, self.window, self.min_votes = config.warmup, config.window, config.min_votes
        self.copies, self.noise, self.smoothing = config.copies, config.noise, config.smoothing
        self.own_labeled, classes = sum(setting.labeled_counts), setting.num_classes
        counts = torch.tensor(setting.labeled_counts, dtype=torch.float64)
        self.register_buffer("own_counts", counts, persistent=False)
        self.register_buffer("counts", counts.clone())
        self.register_buffer("selected", torch.full_like(counts, 1 / classes))
        self.register_buffer("spread", torch.full_like(counts, self.noise))
        # By image and class in one row, and one place more for what is no vote.
        votes = torch.zeros(setting.num_unlabeled * classes + 1, dtype=torch.int32)
        self.register_buffer("votes", votes)
        self.new = StepRows(
            setting.mu * setting.batch_size,
            self.process_group,
            place=torch.tensor(len(votes) - 1),
        )

    def phase_at(self, period: int) -> int:
        """0: no votes; k: those of the (k - 1)-th window have been counted."""
        return 0 if period < self.warmup else 1 + (period - self.warmup) // self.window

    @torch.no_grad()
    def enter_phase(self, phase: int, tools: PhaseTools) -> Change | None:
        """Noise by how far the classes are spread, and from the second time on acceptance."""
        features = tools.features("labeled").double()
        labels = tools.labels()[: self.own_labeled]
        self.spread.copy_(class_spread(features, labels, self.num_classes, self.noise))
        if phase == 1:
            return None
        positions, accepted = self.accepted()
        found = torch.bincount(accepted, minlength=self.num_classes).to(self.counts)
        self.counts.copy_(self.own_counts + found)
        smallest = found[found > 0].min() if len(accepted) else found.new_ones(())
        self.selected.copy_(found.clamp_min(smallest) / found.clamp_min(smallest).sum())
        self.votes.zero_()
        return Change(pseudo_labeled=(positions, accepted))

    def accepted(self) -> tuple[Tensor, Tensor]:
        """int64 [P] positions and [P] labels of the images with votes enough that agree."""
        votes = self.votes[:-1].view(-1, self.num_classes).cpu()
        most, label = votes.max(1)
        total = votes.sum(1)
        positions = ((total > self.min_votes) & (most > AGREE * total)).nonzero()[:, 0]
        return positions, label[positions]

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        features_labeled: Tensor,
        unlabeled_positions: Tensor,
        uniform_labeled: Tensor,
        uniform_unlabeled: Tensor,
        head: Any,
    ) -> MethodOutput:
        """See `Method.forward`; logits are [rows, 2, K], uniforms [images, 2]; those of the
        unlabeled images are not used. `head.logits` makes logits of features."""
        self._check_shapes(logits_labeled, targets, logits_weak, logits_strong, 2)
        targets, dtype = self._checked_targets(targets), prior_dtype(logits_weak)
        weak = logits_weak.detach()
        log_current = labeled_prior(self.counts).log().to(dtype)
        main = self._main_loss(logits_labeled[:, MAIN], targets, log_current)
        if self.phase:
            noisy = head.logits(self._noisy(features_labeled, targets, uniform_labeled, head))
            copies = self._copies()
            shares = self.counts / self.counts.sum()
            again = self._main_loss(noisy[:, MAIN], targets, log_current, copies.to(dtype))
            main = (main + again) / (shares * (1 + copies)).sum().to(dtype)
        labeled = main + adjusted_cross_entropy(
            logits_labeled[:, AUXILIARY], targets, log_current, impl=self.impl
        )
        unlabeled = pseudo_label_cross_entropy(
            weak[:, AUXILIARY], logits_strong[:, AUXILIARY], None, None, 0.0, impl=self.impl
        ).loss
        mask, pseudo_labels = self._candidates(weak[:, MAIN], logits_strong.detach()[:, MAIN])
        if self.training:
            place = unlabeled_positions * self.num_classes + pseudo_labels
            self.new.add(place=torch.where(mask, place, len(self.votes) - 1))
        return self._counted(labeled, unlabeled, targets, mask, pseudo_labels)

    def _main_loss(
        self, logits: Tensor, targets: Tensor, log_prior: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        """Mean over the rows that are not ignored of weight_y CE(logits + log_prior, y')."""
        classes = torch.arange(self.num_classes, device=targets.device)
        label = targets.clamp(0, self.num_classes - 1)
        one_hot = (label[:, None] == classes).to(log_prior.dtype)
        smooth = one_hot * (1 - self.smoothing) + self.smoothing / self.num_classes
        rows = pseudo_label_cross_entropy(
            smooth.log(),
            logits.to(log_prior.dtype),
            None,
            log_prior,
            0.0,
            reduction="none",
            impl=self.impl,
        ).loss
        counted = (targets != IGNORED_TARGET).to(rows.dtype)
        each = counted if weight is None else counted * weight[label]
        views = len(logits) // max(1, len(targets))
        return (rows.view(views, -1) * each).sum() / (views * counted.sum()).clamp_min(1)

    def _copies(self) -> Tensor:
        """c, float64 [K]."""
        counts = self.counts.clamp_min(1)
        reference = counts.sort().values[self.num_classes // 3]
        return (self.copies * reference / counts).floor()

    def _noisy(self, features: Tensor, targets: Tensor, uniforms: Tensor, head: Any) -> Tensor:
        """Features [L*b, D] with noise, the same for all views of an image."""
        label = targets.clamp(0, self.num_classes - 1)
        scale = self.spread[label][:, None] * normals(uniforms, features.shape[1])
        scale = scale.repeat(len(features) // len(targets), 1).to(features.dtype)
        return (features + scale * normalize(features.detach())).to(head.weight.dtype)

    def _candidates(self, weak: Tensor, strong: Tensor) -> tuple[Tensor, Tensor]:
        """bool [N], whether weak and first strong view are sure of one class, and the former's."""
        dtype = prior_dtype(weak)
        adjusted = self.selected.log().to(dtype)
        bound = torch.where(self._bound > 1, self._bound, SURE * self._bound)
        sure, label = (weak.to(dtype) + adjusted).softmax(1).max(1)
        sure_too, same = (strong[: len(weak)].to(dtype) + adjusted).softmax(1).max(1)
        return (label == same) & (sure >= bound) & (sure_too >= bound), label

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """All ranks' votes into the table."""
        if self.phase:
            places = self.from_ranks(self.new["place"])
            self.votes.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
            self.votes[-1].zero_()
        self.new.clear()


def class_spread(features: Tensor, labels: Tensor, classes: int, noise: float) -> Tensor:
    """r, float64 [K]: noise over the mean cosine of a class's features to their mean, at most ten
    times the noise; a class without features has the noise itself.

    Args:
        features: float64 [N, D]. labels: int64 [N].
    """
    of_class = (labels == torch.arange(classes)[:, None]).double()
    number = of_class.sum(1)
    centre = normalize(of_class @ features)
    cosine = (normalize(features) * centre[labels]).sum(1)
    mean = torch.where(number > 0, of_class @ cosine / number.clamp_min(1), 1.0)
    return noise / mean.clamp_min(0.1)


def normals(uniforms: Tensor, size: int) -> Tensor:
    """float64 [n, size], standard normal, from two uniform numbers of 24 bits in each row.

    Their bits are mixed with the column's number by a hash of 32 bits, whose upper 24 go through
    the inverse of the normal distribution function; so all is a function of the uniforms.
    """
    first, second = (uniforms.double() * 2**24).long().unbind(1)
    mixed = _hash(first[:, None] + 40503 * torch.arange(size, device=uniforms.device))
    mixed = _hash(mixed ^ second[:, None])
    fraction = ((mixed >> 8).double() + 0.5) * 2**-24
    return torch.special.ndtri(fraction)


def _hash(words: Tensor) -> Tensor:
    """Hash int64 words below 2^32; multipliers are below 2^31, so that nothing overflows."""
    for factor in (0x7FEB352D, 0x45D9F3B):
        words = ((words ^ (words >> 16)) * factor) & 0xFFFFFFFF
    return words ^ (words >> 16)
