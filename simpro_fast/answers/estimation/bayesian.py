"""Class shares of unlabeled images with intervals, from predicted classes and a confusion matrix.

Model (after Ziegler and Czyż, "Bayesian Quantification with Black-Box Estimators", TMLR 2024), for
K classes, true class y and predicted class c:

    shares             ~ Dirichlet(share_prior, ..., share_prior)
    rates[y]           ~ Dirichlet(row_prior[y])                        what class y is taken for
    confusion[y]       ~ Multinomial(validation images of y, rates[y])
    predicted          ~ Multinomial(unlabeled images, shares @ rates)

It assumes that images of a class are confused alike among the validation images and the unlabeled
ones, and nothing about the network's probabilities. Gibbs sampling with the true classes of the
unlabeled images (counts by true and predicted class) as latent variables makes every step
conjugate. Alone it creeps where shares and rates explain the predicted counts in many ways, so that
steps that change both and leave the predicted distribution about as it is go between (`_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

GIBBS_CLASSES = 64
CHAINS = 4
ENOUGH_R_HAT = 1.05
_FIRST_DRAWS = 1000
_MOST_DRAWS = 16_000
_EXCHANGES = 2
_KEPT = (0.1, 0.5, 0.9, 0.99)
_INDEPENDENT_DRAWS = 400
_SWEEPS = 20
"""Of Gibbs sampling after each independent draw."""
_LEVEL = 0.95
_NOTHING = 1e-4
"""A lower bound below it is 0: no share so small can be told from an absent class."""
_CONTRADICTED = 0.01
"""Share of draws that must explain the counts as badly as they are."""


@dataclass(frozen=True, eq=False)
class ShareIntervals:
    """Posterior of the shares of these images; arrays are float64 [K]."""

    estimate: np.ndarray
    """Posterior mean; sums to 1."""
    low: np.ndarray
    high: np.ndarray
    """Upper end of the shortest interval."""
    sampler: Literal["gibbs", "independent"]
    draws: int
    """Draws of all chains together, after the warm-up."""
    converged: bool
    """Whether the chains agree; true for independent draws."""
    consistent: bool
    """Whether the counts can be what the model says: False where the predicted classes contradict
    the validation images."""


def row_prior(classes: int) -> np.ndarray:
    """[K, K] with the weight of one validation image per class: half of it on the right class, half
    spread evenly over all."""
    return 0.5 * np.eye(classes) + 0.5 / classes


def bayesian_shares(
    confusion: np.ndarray,
    predicted: np.ndarray,
    *,
    seed: int,
    unseen: int = 0,
) -> ShareIntervals:
    """Posterior of the class shares of unlabeled images under a uniform prior, with 95 % intervals.

    The shares are those of these very images (their true classes are drawn as well), not of a
    source that they might come from, whose shares would be less certain. Where only some of them
    were classified, the classes of the others are drawn by the source's shares. Intervals are the
    shortest ones that hold 95 % of the draws, so that they reach 0 where a class may be absent.

    Up to 64 classes by Gibbs sampling; the chains, which start far apart, are lengthened until they
    agree, up to 16,000 steps of each. With more classes that takes too long: there 400 independent
    draws, each of rates and of a predicted distribution from their own posteriors and the shares of
    greatest likelihood for the two, with 20 sweeps of Gibbs sampling, stand in for the posterior.

    Args:
        confusion: validation counts int64 [K, K], rows true, columns predicted, at least one
            image. A class without validation images has the prior's rates, and a wide interval.
        predicted: int64 [K] unlabeled images by predicted class; at least one.
        unseen: further images, from which these were drawn evenly.
        seed: the result is a function of it and of the counts.
    """
    rng = np.random.default_rng(seed)
    classes = len(predicted)
    rows = confusion + row_prior(classes)
    sampler: Literal["gibbs", "independent"]
    if classes <= GIBBS_CLASSES:
        sample, r_hat, surprise = _gibbs(rng, rows, confusion, predicted, unseen)
        sampler = "gibbs"
    else:
        sample, r_hat, surprise = _independent_draws(rng, rows, predicted, unseen), 1.0, 1.0
        sampler = "independent"
    low, high = shortest_intervals(sample)
    return ShareIntervals(
        sample.mean(axis=0),
        low,
        high,
        sampler,
        len(sample),
        bool(r_hat <= ENOUGH_R_HAT),
        bool(surprise >= _CONTRADICTED),
    )


def shortest_intervals(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [K] of the shortest intervals that hold 95 % of the draws [n, K]."""
    ordered = np.sort(sample, axis=0)
    held = int(np.ceil(_LEVEL * len(ordered)))
    widths = ordered[held - 1 :] - ordered[: len(ordered) - held + 1]
    first = widths.argmin(axis=0)
    column = np.arange(sample.shape[1])
    low, high = ordered[first, column], ordered[first + held - 1, column]
    return np.where(low < _NOTHING, 0.0, low), high


def _gibbs(
    rng: np.random.Generator,
    rows: np.ndarray,
    confusion: np.ndarray,
    unlabeled: np.ndarray,
    unseen: int,
) -> tuple[np.ndarray, float, float]:
    """Draws [n, K] of the images' shares, how far the chains are apart, and the share of draws by
    which the counts are no surprise."""
    starts = [_independent(rng, rows, unlabeled) for _ in range(CHAINS)]
    rates, shares = (np.stack(parts) for parts in zip(*starts, strict=True))
    # Half of the chains begin where validation says the least: from shares of any kind.
    shares[CHAINS // 2 :] = _dirichlet(rng, np.ones((CHAINS - CHAINS // 2, len(unlabeled))))
    kept: list[np.ndarray] = []
    surprised: list[np.ndarray] = []
    draws = _FIRST_DRAWS
    while True:
        while len(kept) < draws:
            latent = _latent(rng, rates, shares, unlabeled)
            shares = _dirichlet(rng, 1.0 + latent.sum(axis=2))
            kept.append(_of_all(rng, latent.sum(axis=2), shares, unseen))
            rates = _dirichlet(rng, rows + latent)
            for _ in range(_EXCHANGES):
                rates, shares = _exchange(rng, rates, shares, rows, unlabeled)
            if len(kept) % 10 == 0:
                surprised.append(_as_far(rng, rates, confusion))
        sample = np.stack(kept[draws // 2 :], axis=1)
        r_hat = split_r_hat(sample)
        if r_hat <= ENOUGH_R_HAT or 2 * draws > _MOST_DRAWS:
            second_half = np.concatenate(surprised[len(surprised) // 2 :])
            return sample.reshape(-1, len(unlabeled)), r_hat, float(second_half.mean())
        draws *= 2


def _latent(
    rng: np.random.Generator, rates: np.ndarray, shares: np.ndarray, unlabeled: np.ndarray
) -> np.ndarray:
    """Counts of the unlabeled images by true and predicted class, [chain, true, predicted]."""
    weights = shares[:, :, None] * rates
    by_predicted = (weights / weights.sum(axis=1, keepdims=True)).swapaxes(1, 2)
    return rng.multinomial(unlabeled, by_predicted).swapaxes(1, 2)


def _as_far(rng: np.random.Generator, rates: np.ndarray, confusion: np.ndarray) -> np.ndarray:
    """Whether validation counts drawn by the rates are as far from them as the real ones, [chain].

    A posterior predictive check (Gelman, Meng, Stern, 1996) with the likelihood as the distance:
    rates that explain the predicted classes only by contradicting the validation images fail it.
    """
    logs = np.log(rates)
    images = np.broadcast_to(confusion.sum(axis=1), rates.shape[:2])
    again = rng.multinomial(images, rates)
    ideal = [_entropy_of(counts) for counts in (again, confusion)]
    drawn, real = (
        best - (counts * logs).sum(axis=(1, 2))
        for best, counts in zip(ideal, (again, confusion), strict=True)
    )
    return drawn >= real


def _entropy_of(counts: np.ndarray) -> np.ndarray:
    """Log-likelihood of counts [..., K, K] under their own shares in each row."""
    totals = np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    found: np.ndarray = (counts * np.log(np.maximum(counts, 1) / totals)).sum(axis=(-2, -1))
    return found


def _independent_draws(
    rng: np.random.Generator, rows: np.ndarray, unlabeled: np.ndarray, unseen: int
) -> np.ndarray:
    """Draws [n, K] of the images' shares without a chain."""
    drawn = []
    for _ in range(_INDEPENDENT_DRAWS):
        rates, shares = (part[None] for part in _independent(rng, rows, unlabeled))
        for _ in range(_SWEEPS):
            latent = _latent(rng, rates, shares, unlabeled)
            shares = _dirichlet(rng, 1.0 + latent.sum(axis=2))
        drawn.append(_of_all(rng, latent.sum(axis=2), shares, unseen)[0])
    return np.stack(drawn)


def _of_all(
    rng: np.random.Generator, counts: np.ndarray, shares: np.ndarray, unseen: int
) -> np.ndarray:
    """Shares [chain, K] in the images that were classified and the others together.

    Args:
        counts: [chain, K] true classes of the former. shares: [chain, K] of the source.
    """
    if unseen:
        counts = counts + rng.multinomial(unseen, shares)
    found: np.ndarray = counts / counts.sum(axis=1, keepdims=True)
    return found


def _exchange(
    rng: np.random.Generator,
    rates: np.ndarray,
    shares: np.ndarray,
    rows: np.ndarray,
    unlabeled: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """A Metropolis step of all chains in the coordinates rates [chain, K, K], q = shares @ rates.

    There the posterior is Dirichlet(rows) for rates and Dirichlet(unlabeled + 1) for q, independent
    of each other but for the Jacobian 1 / |det rates| and for the shares, which must not be
    negative. The proposal leaves those Dirichlet distributions as they are (a part of each gamma
    variable is kept, the rest drawn anew), so that only the other factors decide.
    """
    chains, classes = shares.shape
    keep = rng.choice(_KEPT)
    changed = np.ones((chains, classes), bool)
    if rng.random() < 0.5:  # one row alone, where all would hardly be accepted
        changed = rng.integers(classes, size=(chains, 1)) == np.arange(classes)
    proposed = np.where(changed[:, :, None], _renewed(rng, rates, rows, keep), rates)
    q = _renewed(rng, (shares[:, None] @ rates)[:, 0], unlabeled + 1.0, keep)
    moved = np.linalg.solve(proposed.swapaxes(1, 2), q[:, :, None])[:, :, 0]
    inside = moved.min(axis=1) > 0
    gain = np.linalg.slogdet(rates)[1] - np.linalg.slogdet(proposed)[1]
    accepted = inside & (np.log(rng.random(chains)) < gain)
    return (
        np.where(accepted[:, None, None], proposed, rates),
        np.where(accepted[:, None], moved, shares),
    )


def _renewed(
    rng: np.random.Generator, point: np.ndarray, weights: np.ndarray, keep: float
) -> np.ndarray:
    """A step that leaves Dirichlet(weights) over the last axis as it is, and is reversible.

    As gamma variables: Beta(keep w, (1 - keep) w) of each stays, Gamma((1 - keep) w) comes anew.
    """
    mass = rng.standard_gamma(np.broadcast_to(weights.sum(axis=-1), point.shape[:-1]))
    kept = rng.beta(weights * keep, weights * (1 - keep), size=point.shape)
    fresh = rng.standard_gamma(weights * (1 - keep), size=point.shape)
    draws = np.maximum(point * mass[..., None] * kept + fresh, 1e-200)
    return draws / draws.sum(axis=-1, keepdims=True)


def _independent(
    rng: np.random.Generator, rows: np.ndarray, predicted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One draw of rates [K, K] and of a predicted distribution, each from its posterior without
    regard to the other, and the shares [K] of greatest likelihood for them (by EM)."""
    rates, q = _dirichlet(rng, rows), _dirichlet(rng, predicted + 1 / len(predicted))
    shares = np.full(len(q), 1 / len(q))
    for _ in range(300):
        moved = shares * (rates @ (q / (shares @ rates)))
        change = np.abs(moved - shares).sum()
        shares = moved
        if change < 1e-4:
            break
    return rates, np.maximum(shares, 1e-12)


def split_r_hat(sample: np.ndarray) -> float:
    """The largest potential scale reduction of halved chains (Gelman et al., Bayesian Data Analysis
    3, section 11.4).

    Args:
        sample: [chains, draws, K].
    """
    half = sample.shape[1] // 2
    parts = np.concatenate([sample[:, :half], sample[:, half : 2 * half]])
    within = parts.var(axis=1, ddof=1).mean(axis=0)
    between = parts.mean(axis=1).var(axis=0, ddof=1)
    ratio = np.divide(between, within, out=np.zeros_like(within), where=within > 0)
    return float(np.sqrt((half - 1) / half + ratio).max())


def _dirichlet(rng: np.random.Generator, weights: np.ndarray) -> np.ndarray:
    """Over the last axis. Draws of tiny weights underflow; a row of zeros would be no distribution,
    and a 0 could not be left again."""
    draws = np.maximum(rng.standard_gamma(weights), 1e-200)
    return draws / draws.sum(axis=-1, keepdims=True)
