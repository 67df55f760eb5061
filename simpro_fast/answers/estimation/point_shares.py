"""Class shares of unlabeled images from what a network predicts for them: point estimates.

The interval is in `bayesian`. Legend: n images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax, softmax

from simpro_fast.answers.estimation.calibration import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from simpro_fast.answers.estimation.posterior import FLOOR

TOLERANCE, MOST_ITERATIONS = 1e-6, 10_000
"""EM ends where no share moves by more, or after so many steps."""


@dataclass(frozen=True, eq=False)
class EmShares:
    """Result of expectation maximisation."""

    shares: np.ndarray
    """float64 [K]."""
    iterations: int
    converged: bool


def em_shares(
    posteriors: np.ndarray, training_prior: np.ndarray, *, pseudo_images: float = 0.0
) -> EmShares:
    """Shares of greatest likelihood by expectation maximisation (Saerens, Latinne, Decaestecker,
    Neural Computation 2002), started at the training prior.

    Reliable only where the posteriors are calibrated: an overconfident network pushes rare classes
    to 0.

    Args:
        posteriors: [n, K] under the training prior, rows sum to 1.
        training_prior: [K], of any positive sum; floored as in `posterior`.
        pseudo_images: how many images of every class are thought to have been seen besides.
    """
    rows = len(posteriors)
    if not rows:
        raise ValueError("no image to estimate shares from")
    prior = np.maximum(np.asarray(training_prior, np.float64) / np.sum(training_prior), FLOOR)
    likelihoods = posteriors / prior
    found = prior / prior.sum()
    for iteration in range(1, MOST_ITERATIONS + 1):
        evidence = likelihoods @ found
        moved = found * ((1 / evidence) @ likelihoods) + pseudo_images
        moved /= moved.sum()
        change = float(np.abs(moved - found).max())
        found = moved
        if change <= TOLERANCE:
            return EmShares(found, iteration, True)
    return EmShares(found, MOST_ITERATIONS, False)


def calibrated_posteriors(scores: np.ndarray, targets: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Posteriors of images under uniform shares, calibrated on images of known classes.

    softmax(scores / T + c + log v) is fitted to these, v their shares of the classes; T and c [K]
    maximise the likelihood less |c|^2 / 2, which keeps c finite for a class with few images or none
    (temperature with class-wise bias: Alexandari, Kundaje, Shrikumar, ICML 2020).

    Args:
        scores: [m, K], log-likelihoods of the classes as the network has them, up to a constant.
        targets: int [m].
        asked: [n, K], scores of the images to answer for.

    Returns:
        float64 [n, K], rows sum to 1.
    """
    from scipy.optimize import minimize  # half a second

    classes = scores.shape[1]
    scores = np.asarray(scores, np.float64) - np.max(scores, axis=1, keepdims=True)
    one_hot = np.eye(classes)[targets]
    seen = np.log((one_hot.sum(axis=0) + 1) / (len(targets) + classes))

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        inverse, bias = np.exp(weights[0]), weights[1:]
        logs = log_softmax(inverse * scores + bias + seen, axis=1)
        excess = np.exp(logs) - one_hot
        slope = np.append(inverse * (excess * scores).sum(), excess.sum(axis=0) + bias)
        return float(bias @ bias / 2 - logs[one_hot > 0].sum()), slope

    bounds = [
        (-np.log(HIGHEST_TEMPERATURE), -np.log(LOWEST_TEMPERATURE)),
        *[(None, None)] * classes,
    ]
    found = minimize(loss, np.zeros(classes + 1), jac=True, method="L-BFGS-B", bounds=bounds).x
    return np.asarray(softmax(np.exp(found[0]) * asked + found[1:], axis=1))


def black_box_shares(confusion: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Shares that explain the predicted counts through the confusion matrix (black-box shift
    estimation, Lipton, Wang, Smola, ICML 2018): least squares, then the nearest point of the
    simplex.

    Args:
        confusion: validation counts [K, K], rows true, columns predicted. A class without
            validation images is taken to be always right.
        predicted: [K] unlabeled images by predicted class.

    Returns:
        float64 [K].
    """
    confusion, predicted = np.asarray(confusion, np.float64), np.asarray(predicted, np.float64)
    totals = confusion.sum(axis=1, keepdims=True)
    rates = np.where(totals > 0, confusion / np.maximum(totals, 1), np.eye(len(confusion)))
    solution = np.linalg.lstsq(rates.T, predicted / predicted.sum(), rcond=None)[0]
    return project_to_simplex(solution)


def project_to_simplex(point: np.ndarray) -> np.ndarray:
    """The nearest [K] that is not negative and sums to 1 (Duchi et al., ICML 2008)."""
    falling = np.sort(point)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    return np.maximum(point - excess[np.flatnonzero(falling > excess)[-1]], 0)
