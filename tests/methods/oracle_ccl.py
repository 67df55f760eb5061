"""Oracle of one training step of CCL (NeurIPS 2024), written from the authors' code in loops.

Source: github zhouzihao11/CCL, commit 0410cb1b2b2f2a650db18126f2a801c803867abe (2025-08-25).
  supervised A, B; ensemble    train.py:402, 414, 462-473 (log of a prior 102-105)
  consistency A, B; total      train.py:475-488, 515
  smoothed contrastive         train.py:490-501, loss/semiConLoss.py:11-34, 48-65
  reliable contrastive         train.py:504-513, loss/semiConLoss.py:78-93
  class distributions          train.py:307-312, 410-412, 426-427, 530-537
  test; projections            train.py:568, 630-645; models/wideresnet.py:164-172, 194-199

State. pi_l: labeled shares, fixed (there: one drop_last pass over the labeled loader). pi_u starts
uniform, pi_all at pi_l. Two counts start at ONE per class at the start of every epoch. Each step
adds soft, unsharpened q: to count_all where max q >= threshold (labeled images of the heap too),
to count_u where the energy is low and the image is not a labeled one. After the optimizer's step,
when the step WITHIN the epoch is a multiple of `update_every` and the 0-based epoch is greater than
`warm_epochs`: pi <- keep * pi + (1 - keep) * count / sum(count), and the counts start again at one.
What an epoch has counted since its last update is lost. Until commit b37573a (2024-10) the update
was once, at the end of each epoch > warm_epochs: the same where update_every == epoch_steps.
Only the estimate waits for a warm-up: all losses have full weight from the first step.
The rules are the code's: of the paper only the abstract was at hand.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Rows = dict[str, Tensor]  # by view


@dataclass(frozen=True)
class Settings:
    """Defaults of train.py:149-192; the fields with another source name it."""

    mu: int = 1  # unlabeled rows per labeled row: 1 on CIFAR, 2 on ImageNet-127
    tau: float = 2.0  # 0.1 on ImageNet-127
    threshold: float = 0.95
    energy_threshold: float = -8.75  # train.py:504
    temperature: float = 1.0  # of q and the energy (option T)
    lambda1: float = 0.7
    lambda2: float = 1.0  # 1.5 on ImageNet-127
    keep_u: float = 0.5  # option alpha: weight of the OLD pi_u; 0.999 on CIFAR10 reversed
    keep_all: float = 0.5  # option beta: weight of the OLD pi_all; 0.9 on CIFAR10, 0.999 reversed
    warm_epochs: int = 5  # 20 on CIFAR10 consistent and uniform
    update_every: int = 500  # 100 on CIFAR10 reversed
    epoch_steps: int = 500


@dataclass(frozen=True)
class State:
    """Class distributions and running counts; `steps` are the steps done since the start."""

    pi_l: Tensor
    pi_u: Tensor
    pi_all: Tensor
    count_u: Tensor
    count_all: Tensor
    steps: int = 0


@dataclass(frozen=True)
class Result:
    """Outcome of a step; the parts are means before any weight."""

    total: Tensor
    parts: dict[str, Tensor]  # {supervised,consistency}_{a,b}, reliable, smoothed
    probs: Tensor  # [U, K], q: soft, not sharpened
    labels: Tensor  # [U], argmax q
    mask: Tensor  # [U], max q >= threshold
    reliable_mask: Tensor  # [U], energy <= energy_threshold
    state: State


def initial_state(labeled_counts: Tensor) -> State:
    """State before the first step; a class without labeled images is kept (theirs drops it)."""
    counts, ones = labeled_counts.double(), torch.ones(len(labeled_counts)).double()
    return State(counts / counts.sum(), ones / len(ones), counts / counts.sum(), ones, ones)


def log_prior(pi: Tensor, power: float) -> Tensor:
    """Log of pi ** power; the epsilon comes after the power."""
    return torch.log(pi**power + 1e-12)


def cross_entropy(targets: Tensor, log_probs: Tensor) -> Tensor:
    """Cross-entropy of each row between two distributions."""
    return torch.stack([-(t * log_p).sum() for t, log_p in zip(targets, log_probs, strict=True)])


def unit(rows: Tensor) -> Tensor:
    """Rows divided by their length (at least 1e-12, as F.normalize)."""
    return torch.stack([row / row.norm().clamp_min(1e-12) for row in rows])


def sharpened(rows: Tensor) -> Tensor:
    """Rows to the POWER 4, scaled to sum 1, no gradient (train.py:469, semiConLoss.py:57)."""
    return torch.stack([row**4 / (row**4).sum() for row in rows.detach()])


def posterior(row: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """Posterior of `row` from kernel densities; others[j] is of class k with weights[j, k]."""
    kernel = torch.stack([torch.exp(row @ other / 0.1) for other in others])  # 0.1: lines 16, 69
    density = torch.stack([(kernel * column).sum() / column.sum() for column in weights.T])
    return density / density.sum()


def propagated(rows: Tensor, known: Tensor, weights: Tensor) -> Tensor:
    """Smoothed labels of one view: a class-balanced posterior, spread among the view's rows."""
    start = torch.stack([posterior(row, known, weights) for row in rows])
    # No temperature here, and a row is its own neighbour (semiConLoss.py:13-14).
    neighbours = torch.stack([torch.softmax(rows @ row, 0) for row in rows])
    smooth = start
    for _ in range(60):  # converges to 0.8 (I - 0.2 neighbours)^-1 start; the code inverts
        smooth = 0.2 * neighbours @ smooth + 0.8 * start
    return smooth


def smoothed_loss(known: Tensor, weights: Tensor, views: list[Tensor]) -> Tensor:
    """Loss of both strong views against the weak view, plus the entropy of their mean."""
    weak, one, two = (propagated(view, known, weights) for view in views)
    aim = sharpened(weak)  # detached, with its centres and labeled rows
    mean = (one + two) / 2  # its entropy is lowered; the gradient is that of both its factors
    pairs = ((aim, one), (aim, two), (mean, mean))
    return torch.stack([cross_entropy(q, p.log()).mean() for q, p in pairs]).mean()


def reliable_loss(rows: Tensor, weights: Tensor, num_centers: int) -> Tensor:
    """Loss of each row but the centres: its class posterior from all others against its label."""
    losses = []
    for i in range(num_centers, len(rows)):
        others = [j for j in range(len(rows)) if j != i]  # also leaves its own label's weight out
        probs = posterior(rows[i], rows[others], weights[others])
        losses.append(-(weights[i] * probs.log()).sum())
    return torch.stack(losses).mean()


def train_step(
    state: State, s: Settings, targets: Tensor, logits: Rows, projections: Rows, is_labeled: Tensor
) -> Result:
    """Step on logits [rows, head, K] and projections [rows, D] that are not normalised.

    logits: labeled [L] rows of the WEAK view, weak [U], strong [2U] (all of view 1, then view 2).
    projections: labeled [2L] rows of the two STRONG views, weak [U], strong [2U], centers [K]
    (head_fc of the weight rows of head B). is_labeled [U]: heap rows that are labeled images.
    """
    weak, strong = logits["weak"], logits["strong"]
    num_u, num_k = weak.shape[0], weak.shape[2]
    identity = torch.eye(num_k).double()
    one_hot = identity[targets]
    parts = {}
    for part, head, bias in (("a", 0, 0.0), ("b", 1, log_prior(state.pi_l, s.tau))):
        log_probs = (logits["labeled"][:, head] + bias).log_softmax(1)
        parts[f"supervised_{part}"] = cross_entropy(one_hot, log_probs).mean()
    pi_mix = (state.pi_l + s.mu * state.pi_all) / (1 + s.mu)
    adjustment = log_prior(state.pi_u, 1 + s.tau / 2) - log_prior(pi_mix, 1.0)
    ensemble = (weak[:, 0] + adjustment + weak[:, 1]).detach() / 2 / s.temperature
    probs, labels = ensemble.softmax(1), ensemble.argmax(1)
    mask, reliable_mask = probs.amax(1) >= s.threshold, -ensemble.logsumexp(1) <= s.energy_threshold
    sure = torch.cat([mask, mask]).double()  # the mean below is over ALL 2U rows
    for part, head, bias in (("a", 0, 0.0), ("b", 1, log_prior(state.pi_all, s.tau))):
        log_probs = (strong[:, head] + bias).log_softmax(1)
        losses = cross_entropy(identity[torch.cat([labels, labels])], log_probs)
        parts[f"consistency_{part}"] = (sure * losses).mean()
    views = [unit(projections["weak"]), *unit(projections["strong"]).split(num_u)]
    known = torch.cat([unit(projections["centers"]), unit(projections["labeled"])])
    # A centre counts for EVERY class with weight 1 (train.py:496), not for its own alone.
    weights = torch.cat([torch.ones_like(identity), one_hot, one_hot])
    parts["smoothed"] = smoothed_loss(known, weights, views)
    kept = [i for i in range(num_u) if reliable_mask[i]]  # may be empty
    soft = sharpened(probs)[kept]
    rows = torch.cat([known, views[1][kept], views[2][kept]])
    parts["reliable"] = reliable_loss(rows, torch.cat([weights, soft, soft]), num_k)
    consistency = max(1.5, s.mu) * (parts["consistency_a"] + parts["consistency_b"])
    total = s.lambda1 * (parts["supervised_a"] + parts["supervised_b"] + consistency)
    total = total + s.lambda2 * parts["smoothed"] + (1 - s.lambda1) * parts["reliable"]
    after = updated_state(state, s, probs, mask, reliable_mask & ~is_labeled)
    return Result(total, parts, probs, labels, mask, reliable_mask, after)


def updated_state(state: State, s: Settings, probs: Tensor, in_all: Tensor, in_u: Tensor) -> State:
    """State after the step; what this step counts is seen by the next step at the earliest."""
    epoch, step = divmod(state.steps, s.epoch_steps)
    ones = torch.ones_like(state.pi_l)
    count_u, count_all = (ones, ones) if step == 0 else (state.count_u, state.count_all)
    for q, counts_u, counts_all in zip(probs, in_u, in_all, strict=True):
        count_u, count_all = count_u + q * counts_u, count_all + q * counts_all
    after = replace(state, count_u=count_u, count_all=count_all, steps=state.steps + 1)
    if (step + 1) % s.update_every or epoch <= s.warm_epochs:
        return after
    pi_u = s.keep_u * state.pi_u + (1 - s.keep_u) * count_u / count_u.sum()
    pi_all = s.keep_all * state.pi_all + (1 - s.keep_all) * count_all / count_all.sum()
    return replace(after, pi_u=pi_u, pi_all=pi_all, count_u=ones, count_all=ones)


def inference_logits(logits: Tensor, state: State, ensemble: bool = False) -> Tensor:
    """Head B of logits [rows, 2, K], the reported one; or the ensemble that is only logged."""
    adjusted = (logits[:, 0] - log_prior((state.pi_l + state.pi_all) / 2, 1.0) + logits[:, 1]) / 2
    return adjusted if ensemble else logits[:, 1]
