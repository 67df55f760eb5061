"""Bayes' rule for another class distribution, on Gaussians whose posteriors are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from simpro_fast.answers.estimation.posterior import posterior, resolve_prior
from simpro_fast.utils.errors import ConfigError

MEANS = np.array([-1.0, 0.5, 2.0])
PHI = np.array([0.7, 0.25, 0.05])
OTHER = np.array([0.1, 0.2, 0.7])


def exact(x: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """P(y | x) of three unit Gaussians, float64 [n, 3]."""
    joint = norm.pdf(x[:, None], MEANS) * prior
    found: np.ndarray = joint / joint.sum(axis=1, keepdims=True)
    return found


@pytest.mark.parametrize("tau", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("prior", [PHI, OTHER, np.full(3, 1 / 3), np.array([0.5, 0.5, 0.0])])
def test_the_posterior_under_a_prior(tau: float, prior: np.ndarray) -> None:
    x = np.linspace(-4, 5, 50)
    # What minimises CE(f + tau log phi) under phi, up to a constant of each row.
    logits = np.log(exact(x, PHI)) - tau * np.log(PHI) + np.sin(x)[:, None]
    found = posterior(logits, 10 * prior, phi=3 * PHI, tau=tau)
    np.testing.assert_allclose(found, exact(x, prior), atol=1e-12)


def test_without_a_prior_it_is_the_softmax() -> None:
    logits = np.array([[0.0, np.log(3.0)], [700.0, -700.0]])
    found = posterior(logits, None, phi=(0.5, 0.5), tau=2.0)
    np.testing.assert_allclose(found, [[0.25, 0.75], [1.0, 0.0]], atol=1e-12)


def test_a_class_that_training_never_saw_stays_finite() -> None:
    found = posterior(np.zeros((2, 3)), np.full(3, 1 / 3), phi=(0.5, 0.5, 0.0), tau=2.0)
    assert np.isfinite(found).all()


def test_priors_by_name() -> None:
    known = {"labeled": [2.0, 2.0], "estimated": [1.0, 3.0]}
    assert resolve_prior("none", **known) is None
    for name, shares in (("uniform", [0.5, 0.5]), ("labeled", [0.5, 0.5]), ("estimated", [1, 3])):
        found = resolve_prior(name, **known)
        assert found is not None
        np.testing.assert_allclose(found, np.array(shares) / np.sum(shares))
    for wrong, said in (
        ("unifrom", "none, uniform, labeled, estimated"),
        ([0.0, 0.0], "not all 0"),
        ([1.0, -1.0], "not negative"),
        ([1.0, np.nan], "finite"),
        ([1.0], "2 classes"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve_prior(wrong, **known)  # type: ignore[arg-type]
