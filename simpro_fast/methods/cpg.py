"""CPG: unlabeled images join the labeled ones when their pseudo-labels have proved stable."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from simpro_kernels import pseudo_label_cross_entropy
from torch import Tensor
from torch.nn.functional import normalize

from simpro_fast.config.methods import CPGConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Change, Kind, Needs, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import IGNORED_TARGET
from simpro_fast.methods.step_rows import StepRows

MAIN, AUXILIARY = 0, 1
AGREE = 0.8
"""Share of an image's votes above which its label is accepted."""


class CPG(Method):
    """CPG (NeurIPS 2025) by its published code, YaxinHou/CPG at commit 9e9453a.

    Two heads on the same features, A (main) and B (auxiliary). The labeled list is at first that of
    the run, later with accepted unlabeled images; pi_cur are its class shares, n_k its counts. With
    y the label, y' the same of which `smoothing` is spread over the K - 1 other classes, and y'' =
    y' or, for an accepted image, the shares of its votes:

        loss = alpha (C + mean CE(B(x) + log pi_cur, y))
               + mean over all V*N strong rows of CE(B(s), argmax B(w))
        C    = sum (CE(A(x) + log pi_cur, y'') + c_y CE(A'(x) + log pi_cur, y''))
               / sum (1 + c_y)

    over the labeled rows, where A' is A on noisy features z + r_y e * z / |z|, with e normal, and
    c_k = floor(copies n_ref / n_k), n_ref the count that is (K/3)-th from the smallest; in the
    first window floor(copies) for all. During `warmup` c = 0, and B's targets are smoothed too. The
    divisor is a batch's own number of copies, which a rank or micro-batch knows for its own part
    only (`mean_over=terms`), or its expectation, b sum_k pi_cur_k (1 + c_k) for b rows, with which
    training does not depend on how the batch is split (`mean_over=images`, the default; the shipped
    experiments set `terms`).

    At the start of a window r_k = noise / m_k / sum of 1 / m, with m_k the mean over the class's
    features of (cos(z, their mean) + 1) / 2.

    From the period `warmup` on, an unlabeled image votes for class k whenever it is drawn, if
    softmax(A + log pi_sel) of its weak view and of its first strong view both have their largest
    value there, and both reach threshold (1 - smoothing). After every `window` periods those with
    more votes than `vote_share` of the draws of an image in a window, of which more than 80 percent
    agree, join the labeled list, in place of those that joined before, and voting begins anew.
    pi_sel are the shares of the accepted images, where a class with no more of them than the rarest
    labeled class has images gets the smallest of the other counts; uniform before there are any, or
    where all these counts are equal. Test: head A as it is.

    Variants: `released` adds to m_k, of each step, only the last image of a class, as the published
    code does by an index that repeats, and divides by all; `paper` takes the mean. `paper` also has
    the method's own views, a weak labeled one and one strong one, `released` the common ones.

    What is not reproduced: features for r are those of the network in training in the steps of the
    period before the window, labeled views as drawn, so images that join now are not among them
    (there two passes over the new list); a class that was not drawn keeps its m_k, at first 1. The
    c_k copies of an image share their noise e, as the number of rows of a step is fixed: in
    expectation the same. Votes are counted against `vote_share` of the mean number of draws (there
    more than 12, of 130 to 223 in its CIFAR settings). Augmentation and the network are of its own
    protocol.

    A class without labeled images counts as one with a single one in pi_cur and n. mask and pi_u
    are of the images that vote, or would.

    State, equal on all ranks, which collect the votes of all: 8 M K bytes of votes, of this window
    and of the images that have joined, class counts, m and r; and by rank two sums of 8 K (D + 1)
    bytes. Votes are whole numbers, so their order does not matter.
    """

    Config: ClassVar[type[CPGConfig]] = CPGConfig
    votes: Tensor
    joined: Tensor
    own_counts: Tensor
    counts: Tensor
    selected: Tensor
    closeness: Tensor
    spread: Tensor
    last: Tensor

    @classmethod
    def needs(cls, config: CPGConfig) -> Needs:
        positions: tuple[Kind, ...] = ("labeled", "unlabeled")
        return Needs(heads=2, features=("labeled",), positions=positions, head=True, uniforms=2)

    def __init__(self, config: CPGConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.warmup, self.window, self.mean_over = config.warmup, config.window, config.mean_over
        self.copies, self.noise, self.smoothing = config.copies, config.noise, config.smoothing
        drawn = config.window * setting.period * setting.mu * setting.batch_size
        self.enough_votes = config.vote_share * drawn / setting.num_unlabeled
        self.own_labeled, classes = sum(setting.labeled_counts), setting.num_classes
        counts = torch.tensor(setting.labeled_counts, dtype=torch.float64)
        self.register_buffer("own_counts", counts, persistent=False)
        self.register_buffer("counts", counts.clone())
        self.register_buffer("selected", torch.full_like(counts, 1 / classes))
        self.register_buffer("closeness", torch.ones_like(counts))
        self.register_buffer("spread", torch.zeros_like(counts))
        # By image and class in one row, and one place more for what is no vote.
        votes = torch.zeros(setting.num_unlabeled * classes + 1, dtype=torch.int32)
        self.register_buffer("votes", votes)
        self.register_buffer("joined", votes[1:].view(-1, classes).clone())
        # By class, of features and of their directions: the sum, and in the last column how many.
        self.features = torch.zeros(classes, setting.features + 1, dtype=torch.float64)
        self.directions = torch.zeros_like(self.features)
        self.register_buffer("last", torch.zeros_like(self.features), persistent=False)
        self.rank_counts = (*self.rank_counts, "features", "directions")
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
        wide = 1 / self.closeness
        self.spread.copy_(self.noise * wide / wide.sum())
        if phase == 1:
            return None
        positions, accepted = self.accepted()
        found = torch.bincount(accepted, minlength=self.num_classes).to(self.counts)
        self.counts.copy_(self.own_counts + found)
        self.selected.copy_(selected_shares(found, self.own_counts))
        self.joined.zero_()
        chosen = self.votes[:-1].view_as(self.joined)[positions.to(self.votes.device)]
        self.joined[: len(positions)] = chosen
        self.votes.zero_()
        return Change(pseudo_labeled=(positions, accepted))

    def accepted(self) -> tuple[Tensor, Tensor]:
        """int64 [P] positions and [P] labels of the images with votes enough that agree."""
        votes = self.votes[:-1].view(-1, self.num_classes).cpu()
        most, label = votes.max(1)
        total = votes.sum(1).double()
        enough = (total > self.enough_votes) & (most > AGREE * total)
        positions = enough.nonzero()[:, 0]
        return positions, label[positions]

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        features_labeled: Tensor,
        labeled_positions: Tensor,
        unlabeled_positions: Tensor,
        uniform_labeled: Tensor,
        uniform_unlabeled: Tensor,
        head: Any,
    ) -> MethodOutput:
        """See `Method.forward`; logits are [rows, 2, K], uniforms [images, 2]; those of the
        unlabeled images are not used. `head.logits` makes logits of features."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong, 2)
        targets, dtype = self.checked_targets(targets), prior_dtype(logits_weak)
        weak = logits_weak.detach()
        labels = targets.clamp(0, self.num_classes - 1)
        counted = (targets != IGNORED_TARGET).to(dtype)
        counted = torch.where((targets == labels) | (counted == 0), counted, torch.nan)
        log_current = labeled_prior(self.counts).log()
        wanted = self._wanted(labels, labeled_positions)
        rows = self._soft_rows(wanted, logits_labeled[:, MAIN], log_current)
        copies = self._copies()
        each = 1 + copies[labels].to(dtype)
        if self.phase:
            noisy = head.logits(self._noisy(features_labeled, labels, uniform_labeled, head))
            again = self._soft_rows(wanted, noisy[:, MAIN], log_current)
            rows = rows + (each - 1) * again
        number = counted.sum()
        if self.mean_over == "terms":
            terms = (each * counted).sum()
        else:
            terms = number * (labeled_prior(self.counts) * (1 + copies)).sum().to(dtype)
        main = (rows.mean(0) * counted).sum() / terms.clamp_min(1)
        smoothing = 0.0 if self.phase else self.smoothing
        rows = self._soft_rows(
            self._one_hot(labels, smoothing), logits_labeled[:, AUXILIARY], log_current
        )
        labeled = main + (rows.mean(0) * counted).sum() / number.clamp_min(1)
        answer = self._one_hot(weak[:, AUXILIARY].argmax(1), smoothing)
        unlabeled = self._soft_rows(answer, logits_strong[:, AUXILIARY], None).mean(0).sum()
        unlabeled = unlabeled / max(1, len(weak))
        mask, pseudo_labels = self._candidates(weak[:, MAIN], logits_strong.detach()[:, MAIN])
        if self.training:
            self._look(features_labeled, targets)
            place = unlabeled_positions * self.num_classes + pseudo_labels
            self.new.add(place=torch.where(mask, place, len(self.votes) - 1))
        return self.counted(labeled, unlabeled, targets, mask, pseudo_labels)

    def _one_hot(self, labels: Tensor, smoothing: float) -> Tensor:
        """float64 [n, K] of int64 [n], of which `smoothing` is spread over the other classes."""
        same = labels[:, None] == torch.arange(self.num_classes, device=labels.device)
        others = smoothing / max(1, self.num_classes - 1)
        return others + (1 - smoothing - others) * same.double()

    def _wanted(self, labels: Tensor, positions: Tensor) -> Tensor:
        """A's targets, float64 [b, K]."""
        joined = positions - self.own_labeled
        votes = self.joined[joined.clamp(0, len(self.joined) - 1)].double()
        shares = votes / votes.sum(1, keepdim=True).clamp_min(1)
        return torch.where(joined[:, None] < 0, self._one_hot(labels, self.smoothing), shares)

    def _soft_rows(self, wanted: Tensor, logits: Tensor, log_prior: Tensor | None) -> Tensor:
        """Cross entropy [V, n] of view-major rows [V*n, K] towards float64 [n, K]."""
        dtype = prior_dtype(logits)
        rows = pseudo_label_cross_entropy(
            wanted.log().to(dtype),
            logits.to(dtype),
            None,
            log_prior if log_prior is None else log_prior.to(dtype),
            0.0,
            reduction="none",
            impl=self.impl,
        ).loss
        return rows.view(len(logits) // max(1, len(wanted)), -1)

    def _copies(self) -> Tensor:
        """c, float64 [K]."""
        if self.phase < 2:
            return torch.full_like(self.counts, int(self.copies) if self.phase else 0)
        counts = self.counts.clamp_min(1)
        reference = counts.sort().values[self.num_classes // 3]
        return (self.copies * reference / counts).floor()

    def _noisy(self, features: Tensor, labels: Tensor, uniforms: Tensor, head: Any) -> Tensor:
        """Features [L*b, D] with noise, the same for all views of an image."""
        scale = self.spread[labels][:, None] * normals(uniforms, features.shape[1])
        scale = scale.repeat(len(features) // max(1, len(labels)), 1).to(features.dtype)
        return (features + scale * normalize(features)).to(head.weight.dtype)

    def _candidates(self, weak: Tensor, strong: Tensor) -> tuple[Tensor, Tensor]:
        """bool [N], whether weak and first strong view are sure of one class, and the former's."""
        dtype = prior_dtype(weak)
        adjusted = self.selected.log().to(dtype)
        bound = torch.where(self.bound > 1, self.bound, (1 - self.smoothing) * self.bound)
        sure, label = (weak.to(dtype) + adjusted).softmax(1).max(1)
        sure_too, same = (strong[: len(weak)].to(dtype) + adjusted).softmax(1).max(1)
        return (label == same) & (sure >= bound) & (sure_too >= bound), label

    @torch.no_grad()
    def _look(self, features: Tensor, targets: Tensor) -> None:
        """Add the first view's features of each class, and their directions, to the sums.

        Sums are matrix products, since adding by index has no fixed order on a GPU.
        """
        seen = features[: len(targets)].double()
        one = seen.new_ones(len(seen), 1)
        # [K, b]
        of_class = torch.arange(self.num_classes, device=targets.device)[:, None] == targets
        self.features.add_(of_class.double() @ torch.cat([seen, one], 1))
        if self.variant == "released":
            of_class = of_class & (of_class.flip(1).cumsum(1).flip(1) == 1)
        directions = of_class.double() @ torch.cat([normalize(seen), one], 1)
        if self.variant == "released":
            self.last.copy_(torch.where(of_class.any(1, keepdim=True), directions, self.last))
        else:
            self.directions.add_(directions)

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """All ranks' votes into the table, and the last image of each class into the sum."""
        if self.variant == "released":
            # That of the last rank that has one; with its own, a rank needs the others' flags only.
            found = self.from_ranks(self.last[None, :, -1])
            distributed = dist.is_available() and dist.is_initialized()
            rank = dist.get_rank(self.process_group) if distributed else 0
            later = found[rank + 1 :].sum(0) > 0
            self.directions.add_(torch.where(later[:, None], 0.0, self.last))
            self.last.zero_()
        if self.phase:
            places = self.from_ranks(self.new["place"])
            self.votes.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
            self.votes[-1].zero_()
        self.new.clear()

    @torch.no_grad()
    def end_period(self) -> None:
        """m of the classes that were drawn in this period."""
        features, directions = self.over_ranks(self.features), self.over_ranks(self.directions)
        number, centre = features[:, -1], normalize(features[:, :-1])
        total = ((directions[:, :-1] * centre).sum(1) + directions[:, -1]) / 2
        mean = (total / number).clamp_min(1e-6)  # 0: all features counted are opposite to the mean
        self.closeness.copy_(torch.where(number > 0, mean, self.closeness))
        self.features.zero_()
        self.directions.zero_()
        super().end_period()


def selected_shares(accepted: Tensor, labeled: Tensor) -> Tensor:
    """pi_sel, float64 [K], of how many images of each class are accepted and how many labeled."""
    large = accepted > labeled.min()
    others = torch.where(large, accepted, torch.inf).min()
    counts = torch.where(large, accepted, others if large.any() else 1.0)
    return counts / counts.sum()


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
