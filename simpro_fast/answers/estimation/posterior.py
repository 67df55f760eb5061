"""Class probabilities under a class distribution other than that of the training.

Legend: f the logits [n, K] of a network trained with the loss CE(f + tau log phi), phi the class
distribution of what it was trained on, p the distribution at hand. At its optimum
softmax(f + tau log phi) is the posterior under phi, so that Bayes' rule gives the one under p:

    P(y | x; p) ~ softmax(f + tau log phi)_y p_y / phi_y ~ exp(f_y + (tau - 1) log phi_y) p_y

With tau = 1 the plain logits need p alone; tau = 0 is a network trained without adjustment.
Source: Saerens, Latinne, Decaestecker (Neural Computation 2002), eq. 2.4; Menon et al., "Long-tail
learning via logit adjustment" (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import log_softmax

from simpro_fast.utils.errors import ConfigError

PRIORS = ("none", "uniform", "labeled", "estimated")
"""Names that `resolve_prior` knows."""
FLOOR = 1e-6
"""A class that the training has not seen has this share, instead of one that no rule could lift."""


def posterior(
    logits: np.ndarray, prior: np.ndarray | None, *, phi: Sequence[float], tau: float
) -> np.ndarray:
    """float64 [n, K], rows sum to 1.

    Args:
        logits: float [n, K], plain.
        prior: p, [K], of any positive sum; None: softmax(f), as it stands.
        phi: [K], of any positive sum.
        tau: strength of the adjustment in the loss.
    """
    scores = np.asarray(logits, np.float64)
    if prior is not None:
        trained = np.maximum(np.asarray(phi, np.float64) / np.sum(phi), FLOOR)
        with np.errstate(divide="ignore"):  # a share of 0 rules its class out
            scores = scores + (tau - 1) * np.log(trained) + np.log(prior / np.sum(prior))
    return np.exp(log_softmax(scores, axis=1))


def resolve_prior(
    prior: str | Sequence[float] | np.ndarray,
    *,
    labeled: Sequence[float],
    estimated: Sequence[float],
) -> np.ndarray | None:
    """A prior by name or as shares, normalised, float64 [K]; None for `none`.

    Raises:
        ConfigError: an unknown name, another number of classes, a share that is negative or not
            finite, or none above 0.
    """
    if isinstance(prior, str):
        if prior not in PRIORS:
            raise ConfigError(f"prior {prior!r} is none of {', '.join(PRIORS)}")
        if prior == "none":
            return None
        named = {"labeled": labeled, "estimated": estimated, "uniform": [1.0] * len(labeled)}
        prior = named[prior]
    shares = np.asarray(prior, np.float64)
    if shares.shape != (len(labeled),):
        raise ConfigError(
            f"a prior of {len(labeled)} classes was expected, got {list(shares.shape)} numbers"
        )
    if not np.isfinite(shares).all() or shares.min() < 0 or not shares.sum() > 0:
        raise ConfigError("the shares of a prior must be finite, not negative, and not all 0")
    return np.asarray(shares / shares.sum())
