"""DARP: pseudo-labels of all unlabeled images, refined together towards given class counts."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy
from torch import Tensor

from simpro_fast.config.methods import DARPConfig
from simpro_fast.methods.anchors import labeled_prior
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Needs, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.step_rows import StepRows, last_of_each
from simpro_fast.utils.errors import ConfigError

FLOOR = 1e-6
EM_STEPS = 100
NEWTON_STEPS = 15
"""From the root of the last round the residual is at rounding after about eight; of confident
tables from ratios e^3 off, after ten."""


class DARP(Method):
    """DARP on FixMatch (Kim et al., NeurIPS 2020).

    P [M, K] has the last softmax(f(w)) of every unlabeled image, uniform before there is one. After
    the first whole period beyond `refine_after` of the run's periods, every `refine_every` steps P
    is refined to X, see `refined`, whose columns sum to nearly M times the class shares. Then

        loss = alpha * mean CE(f(x), y)
               + mean over all V*N strong rows of [max X_i >= threshold] CE(f(s), argmax X_i)

    with the row X_i of an image as it was refined last. Before, softmax(f(w)) is in place of X_i.
    Test: the head as it is.

    The class shares are, by default, those of greatest likelihood under the averaged network when
    refinement begins, by EM from the labeled shares (Saerens et al., 2002). The method's own
    numbers for other distributions come from a network trained on the labeled images alone, through
    its confusion matrix on held-out images; such an estimate can be given as `shares`.

    Variants: formulas are the same; `paper` has the method's own views, weak labeled ones and two
    strong ones, `released` the common ones. The published numbers come from the former.

    What is not reproduced: there the step of a refinement trains on it, here the next one does
    (other ranks' predictions are not known before); Newton's method stops at steps of 0.1 or 0.3
    there, here it goes on to the root, and works on the logarithm of the equation, since the plain
    iteration leaves the range of numbers where rows are confident; Adam at a constant 0.002 and
    labeled images in the unlabeled list belong to its own protocol.

    A class without labels counts as one with a single image. The weak views' entropies are at least
    1e-6. The tracked pi_u counts the labels that are trained on, so it leans to `shares`.

    State, equal on all ranks, which collect the predictions of all and refine for themselves: P,
    4 M K bytes, the shares, and label and confidence of every row of X. A refinement needs up to
    70 M K bytes for a moment.
    """

    Config: ClassVar[type[DARPConfig]] = DARPConfig
    table: Tensor
    refined_label: Tensor
    refined_confidence: Tensor
    target: Tensor
    prior: Tensor

    @classmethod
    def needs(cls, config: DARPConfig) -> Needs:
        return Needs(positions=("unlabeled",))

    def __init__(self, config: DARPConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        images, classes = setting.num_unlabeled, setting.num_classes
        self.plain = config.refine_after * setting.periods
        self.refine_every, self.rounds = config.refine_every, config.rounds
        self.keep_factor = config.keep_factor
        shares = labeled_prior(setting.labeled_counts)
        self.register_buffer("prior", shares, persistent=False)
        self.estimates = config.shares is None
        if isinstance(config.shares, tuple):
            if len(config.shares) != classes:
                raise ConfigError(
                    f"method.shares: {len(config.shares)} numbers for {classes} classes"
                )
            shares = torch.tensor(config.shares, dtype=torch.float64)
        self.register_buffer("target", images * shares / shares.sum())
        # The extra row takes writes of rows without a slot, so that shapes stay static.
        self.register_buffer("table", torch.full((images + 1, classes), 1 / classes))
        self.register_buffer("refined_label", torch.zeros(images, dtype=torch.int64))
        self.register_buffer("refined_confidence", torch.zeros(images))
        self.new = StepRows(
            setting.mu * setting.batch_size,
            self.process_group,
            positions=torch.tensor(images),
            predicted=torch.zeros(classes),
        )

    def phase_at(self, period: int) -> int:
        """0: FixMatch; 1: DARP."""
        return int(period > self.plain)

    @torch.no_grad()
    def enter_phase(self, phase: int, tools: PhaseTools) -> None:
        if self.estimates:
            said = tools.logits("unlabeled").double().softmax(1)
            shares = em_shares(said, self.prior.cpu()).clamp_min(1 / len(said))
            self.target.copy_(len(said) * shares / shares.sum())
        self.refine()

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        unlabeled_positions: Tensor,
    ) -> MethodOutput:
        """See `Method.forward`; positions are int64 [N]."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets, dtype = self.checked_targets(targets), prior_dtype(logits_weak)
        labeled = adjusted_cross_entropy(logits_labeled, targets, None, impl=self.impl)
        predicted = logits_weak.detach().to(dtype).softmax(1)
        if self.phase:
            pseudo_labels = self.refined_label[unlabeled_positions]
            confidence = self.refined_confidence[unlabeled_positions]
        else:
            confidence, pseudo_labels = predicted.max(1)
        mask = confidence >= self.bound
        rows = self.masked_cross_entropy(logits_strong, pseudo_labels, mask)
        unlabeled = rows.sum() / max(1, len(rows))
        if self.training:
            self.new.add(positions=unlabeled_positions, predicted=predicted)
        return self.counted(labeled, unlabeled, targets, mask, pseudo_labels)

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """All ranks' predictions into the table, and a refinement where it is due."""
        positions = last_of_each(self.from_ranks(self.new["positions"]), len(self.table) - 1)
        self.table.index_copy_(0, positions, self.from_ranks(self.new["predicted"]))
        self.new.clear()
        if self.phase and (step + 1) % self.refine_every == 0:
            self.refine()

    @torch.no_grad()
    def refine(self) -> None:
        """Labels and confidences of all unlabeled images, from the table as it is."""
        found = refined(
            self.table[:-1].double(), self.target, keep_factor=self.keep_factor, rounds=self.rounds
        )
        confidence, label = found.max(1)
        self.refined_label.copy_(label)
        self.refined_confidence.copy_(confidence)


def refined(table: Tensor, target: Tensor, *, keep_factor: float, rounds: int) -> Tensor:
    """The table nearest to `table` whose columns sum to `target`.

    First, of each class k only the floor(keep_factor target_k) largest entries stay, scaled to sum
    to target_k; 1e-6 is added everywhere, and rows are normalised to P. Then, with h_n the entropy
    of row n, min sum_n KL(X_n || P_n) / h_n over tables X whose rows sum to 1 and whose columns sum
    to `target`, by rounds of alternate scaling: with X_nk = P_nk / e * x_n * exp(-nu_k h_n) and nu
    of ones at the start, x makes the rows right, then nu the columns, and at the end x once more.

    Nothing is read by the host; on the same device the result is the same on all ranks.

    Args:
        table: float64 [M, K] of probabilities. target: float64 [K], above 0, of sum M.
        keep_factor: above 0. rounds: at least 1.

    Returns:
        X, float64 [M, K]: rows are right, columns nearly.
    """
    places = torch.arange(len(table), device=table.device)[:, None]
    order = table.argsort(dim=0, descending=True, stable=True)
    kept = torch.zeros_like(table, dtype=torch.bool)
    kept.scatter_(0, order, places < (keep_factor * target).floor())
    clean = torch.where(kept, table, 0.0)
    clean = clean * ((target + FLOOR) / (clean.sum(0) + FLOOR)) + FLOOR
    clean = clean / clean.sum(1, keepdim=True)
    entropy = -(clean * (clean + FLOOR).log()).sum(1, keepdim=True).clamp_max(-FLOOR)
    log_base = clean.log() - 1
    nu = torch.ones_like(target)
    for _ in range(rounds):
        log_x = -(log_base - nu * entropy).logsumexp(1, keepdim=True)
        nu = solve_columns(log_base + log_x, entropy, target.log(), nu)
    return (log_base - nu * entropy).softmax(1)


def em_shares(posteriors: Tensor, prior: Tensor) -> Tensor:
    """Class shares [K] of greatest likelihood, of posteriors float64 [M, K] under `prior` [K]."""
    shares, likelihoods = prior.clone(), posteriors / prior
    for _ in range(EM_STEPS):
        weighted = likelihoods * shares
        shares = (weighted / weighted.sum(1, keepdim=True)).mean(0)
    return shares


def solve_columns(log_weight: Tensor, entropy: Tensor, log_target: Tensor, nu: Tensor) -> Tensor:
    """nu_k with sum_n exp(log_weight_nk - nu_k h_n) = target_k, for all classes at once.

    The logarithm of the left side is convex in nu_k and its slope is between -max h and -min h, so
    that Newton's method on it is finite from any start, and after one step monotone.

    Args:
        log_weight: float64 [M, K]. entropy: h, float64 [M, 1], above 0.
        log_target: float64 [K]. nu: float64 [K], where to start.
    """
    for _ in range(NEWTON_STEPS):
        terms = log_weight - nu * entropy
        log_sum = terms.logsumexp(0)
        slope = ((terms - log_sum).exp() * entropy).sum(0)
        nu = nu + (log_sum - log_target) / slope
    return nu
