"""CCL: contrast of projected features towards continuous pseudo-labels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from simpro_kernels import adjusted_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import CCLConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Heads, Needs, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import log_prior

B = 1
TEMPERATURE = 0.1
SHARPNESS = 4.0
"""Power of the pseudo-labels that features are drawn towards."""
PROPAGATION = 0.2
"""Share of a smoothed pseudo-label that comes from the other unlabeled images."""


class CCL(Method):
    """CCL (Zhou et al., NeurIPS 2024) by its published code, zhouzihao11/CCL at commit 0410cb1.

    Two heads A and B on the same features, and two projections (linear, batch norm, ReLU, linear to
    2 D numbers of length 1) that the optimizer trains with the network: h of the features of all
    views, c of the K rows of B's weights, the centres. pi_l are the labeled shares, u estimates
    those of the unlabeled images, v those of all images in the unlabeled stream. Pseudo-labels are
    q = softmax z, without gradient:

        z    = (A(w) - log((pi_l + mu v) / (1 + mu)) + (1 + tau / 2) log u + B(w)) / 2
        loss = r (alpha (CE(A(x), y) + CE(B(x) + tau log pi_l, y)) + max(1.5, mu) (U_A + U_B))
               + smooth_weight S + (1 - r) R,                               r = classify_weight

    U_h is the mean over all V*N strong rows of [max q >= threshold] CE(h(s) + o_h, argmax q), o_B =
    tau log v and o_A = 0. For the contrast, with k(a, b) = exp(a . b / 0.1) and labels t_j [K] of
    rows j: one-hot for a labeled view, and 1 for every class for a centre,

        p_ik = sum_j k(h_i, h_j) t_jk / sum_j t_jk,     scaled to sum to 1 over the classes.

    S (smoothed): j runs over centres and labeled views, i over the unlabeled images of one view.
    These pass on p among each other, f = 0.8 (I - 0.2 softmax(h h'))^-1 p. With f_w of the weak
    view, without gradient and to the power 4 (normalised), f_s of strong view s and f' their mean,

        S = (sum over s of CE(f_s, f_w^4) + entropy of f') / (V + 1),      mean over images.

    R (reliable): i and j run over labeled and strong views, j also over the centres, never i = j.
    An image is reliable if logsumexp z >= `energy`; then its strong views have the label q^4,
    normalised, else they are left out. R = mean over these rows i of CE(p_i, t_i).

    After period `estimate_after`, u and v move at the end of each period towards the sum of q over
    the reliable images (u) and over those above the threshold (v), 1 added for each class: u by
    `estimate_decay`, v by `all_decay`. u begins uniform, v as pi_l. Test: head B as it is.

    As in the published code, S and R and the batch norm of h compare the rows that a rank has at
    once, and R divides by their number: so training depends on how a batch is split over ranks and
    micro-batches, short of `classify_weight=1 smooth_weight=0`.

    Variants differ in the floor of the logarithms, see `log_prior`. What is not reproduced: labeled
    views are those of the protocol (there a weak one for the heads and two of SimCLR's for the
    contrast), all of them in both; u and v move by the period (there each 100 or 500 steps);
    labeled images in an overlapping unlabeled list count in u. The projections begin as torch
    makes them, as with biases of 0 a head of zeros would have centres without a direction. A class
    without labeled images counts as one with a single one in pi_l.

    State, equal on all ranks: u and v.
    """

    Config: ClassVar[type[CCLConfig]] = CCLConfig
    rank_counts = (*Method.rank_counts, "reliable", "sure")
    prior: Tensor
    u: Tensor
    v: Tensor

    @classmethod
    def needs(cls, config: CCLConfig) -> Needs:
        return Needs(heads=2, features=("labeled", "weak", "strong"), head=True)

    def __init__(self, config: CCLConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.tau, self.energy, self.mu = config.tau, config.energy, setting.mu
        self.classify_weight, self.smooth_weight = config.classify_weight, config.smooth_weight
        self.estimate_decay, self.all_decay = config.estimate_decay, config.all_decay
        self.estimate_after = config.estimate_after
        prior = labeled_prior(setting.labeled_counts)
        self.register_buffer("prior", prior, persistent=False)
        self.register_buffer("u", torch.full_like(prior, 1 / len(prior)))
        self.register_buffer("v", prior.clone())
        self.reliable, self.sure = torch.zeros_like(prior), torch.zeros_like(prior)
        self.projection, self.centre_projection = mlp(setting.features), mlp(setting.features)

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        features_labeled: Tensor,
        features_weak: Tensor,
        features_strong: Tensor,
        head: Any,
    ) -> MethodOutput:
        """See `Method.forward`; features are [rows, D]."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong, 2)
        targets, dtype = self.checked_targets(targets), prior_dtype(logits_weak)
        fused = self.fused(logits_weak.detach())
        q = fused.softmax(1)
        confidence, pseudo_labels = q.max(1)
        mask, reliable = confidence >= self.bound, fused.logsumexp(1) >= self.energy
        labeled, unlabeled = self._classify(
            logits_labeled, targets, logits_strong, pseudo_labels, mask
        )
        views = [features_labeled, features_weak, features_strong]
        projected = F.normalize(self.projection(torch.cat(views).to(dtype)), dim=1)
        x, w, s = projected.split([len(rows) for rows in views])
        rows = head.rows().unflatten(0, (2, -1))[B].to(dtype)
        centres = F.normalize(self.centre_projection(rows), dim=1)
        classes = torch.arange(self.num_classes, device=targets.device)
        known = (targets[:, None] == classes).to(dtype).repeat(len(x) // len(targets), 1)
        near = (SHARPNESS * fused).softmax(1) * reliable[:, None]
        contrast = self.smooth_weight * smoothed(centres, x, known, w, s)
        contrast = contrast + (1 - self.classify_weight) * reliable_contrast(
            centres, torch.cat([x, s]), torch.cat([known, near.repeat(self.strong_views, 1)])
        )
        if self.training:
            self.reliable.add_((q * reliable[:, None]).sum(0))
            self.sure.add_((q * mask[:, None]).sum(0))
        return self.counted(labeled, unlabeled + contrast, targets, mask, pseudo_labels)

    def fused(self, logits_weak: Tensor) -> Tensor:
        """z, [N, K], of float [N, 2, K]."""
        dtype = prior_dtype(logits_weak)
        drawn = (self.prior + self.mu * self.v) / (1 + self.mu)
        shift = log_prior(self.u, 1 + self.tau / 2, self.variant)
        shift = (shift - log_prior(drawn, 1, self.variant)).to(dtype)
        return (logits_weak.to(dtype).sum(1) + shift) / 2

    def _classify(
        self, labeled: Tensor, targets: Tensor, strong: Tensor, pseudo_labels: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Labeled and unlabeled loss of both heads, weighted."""
        # Rows of both heads in one launch: row (l b + i) 2 + head belongs to target 2 i + head.
        given = 2 * adjusted_cross_entropy(
            self._for_b(labeled, self.prior).reshape(-1, self.num_classes),
            targets.repeat_interleave(2),
            None,
            impl=self.impl,
        )
        both = (tensor[:, None].expand(-1, 2) for tensor in (pseudo_labels, mask))
        rows = self.masked_cross_entropy(self._for_b(strong, self.v), *both)
        guessed = 2 * max(1.5, self.mu) * rows.mean()
        return self.classify_weight * given, self.classify_weight * guessed

    def _for_b(self, logits: Tensor, shares: Tensor) -> Tensor:
        """Logits [rows, 2, K] with tau log shares added to those of B."""
        adjustment = log_prior(shares, self.tau, self.variant)
        return logits + torch.stack([0 * adjustment, adjustment]).to(prior_dtype(logits))

    def phase_at(self, period: int) -> int:
        """0 before u and v move, then 1."""
        return int(period > self.estimate_after)

    @torch.no_grad()
    def end_period(self) -> None:
        super().end_period()
        if self.phase:
            u, v = 1 + self.over_ranks(torch.stack([self.reliable, self.sure]))
            self.u.lerp_(u / u.sum(), 1 - self.estimate_decay)
            self.v.lerp_(v / v.sum(), 1 - self.all_decay)
        self.reliable.zero_()
        self.sure.zero_()

    def normalised_pi_u(self) -> Tensor:
        """u, float64 [K]: the estimate that training follows."""
        return self.u / self.u.sum()

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        return heads.plain(B)


def mlp(features: int) -> nn.Sequential:
    """A projection, [rows, D] to [rows, 2 D]; normalised by the rows of a call only."""
    norm = nn.BatchNorm1d(features, track_running_stats=False)
    last = nn.Linear(features, 2 * features)
    return nn.Sequential(nn.Linear(features, features), norm, nn.ReLU(), last)


def similar(rows: Tensor, others: Tensor) -> Tensor:
    """k, [n, m], of rows [n, P] and [m, P] of length 1."""
    return (rows @ others.T / TEMPERATURE).exp()


def smoothed(
    centres: Tensor, labeled: Tensor, known: Tensor, weak: Tensor, strong: Tensor
) -> Tensor:
    """S, [].

    Args:
        centres: [K, P]. labeled: [L*B, P], with labels known: [L*B, K], zeros for none.
        weak: [N, P]. strong: [V*N, P], view-major.
    """
    others = torch.cat([centres, labeled])
    labels = torch.cat([known.new_ones(known.shape[1], known.shape[1]), known])
    labels = labels / labels.sum(0)

    def propagated(rows: Tensor) -> Tensor:
        shares = F.normalize(similar(rows, others) @ labels, p=1, dim=1)
        found, step = (1 - PROPAGATION) * shares, PROPAGATION * (rows @ rows.T).softmax(1)
        # (I - step)^-1 as (I + step) (I + step^2) (I + step^4) ...: what is left out is below
        # 0.2^32, and nothing has to look for a singular matrix, which would wait for the device.
        for _ in range(5):
            found, step = found + step @ found, step @ step
        return found

    with torch.no_grad():  # nor do the centres and labeled views learn from it
        target = (SHARPNESS * propagated(weak).log()).softmax(1)
    views = torch.stack([propagated(view) for view in strong.split(len(weak))])
    mean = views.mean(0)
    rows = (target * views.log()).sum((0, 2)) + (mean * mean.log()).sum(1)
    return -rows.mean() / (len(views) + 1)


def reliable_contrast(centres: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """R, [].

    Args:
        centres: [K, P]. rows: [n, P], with labels: [n, K], zeros for rows that are left out.
    """
    classes = len(centres)
    sides = torch.cat([labels.new_ones(classes, classes), labels])
    near = similar(rows, torch.cat([centres, rows]))
    near = near.diagonal_scatter(near.new_zeros(len(rows)), classes)
    scores = (near @ sides).log() - (sides.sum(0) - labels).log()
    return -(labels * scores.log_softmax(1)).sum() / labels.sum().clamp_min(1)
