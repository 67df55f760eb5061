"""quapy is the oracle of the point estimates (its Bayesian one needs jax)."""

import numpy as np
import pytest
import quapy.functional as quapy_functional
from quapy.method.aggregative import ACC, EMQ
from sklearn.linear_model import LogisticRegression

from simpro_fast.answers.estimation import point_shares
from simpro_fast.answers.estimation.point_shares import (
    black_box_shares,
    calibrated_posteriors,
    em_shares,
    project_to_simplex,
)

PRIOR, SHARES = np.array([0.6, 0.3, 0.1]), np.array([0.15, 0.25, 0.6])


def posteriors(n: int, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Exact posteriors under PRIOR of points of three Gaussians on a line, mixed by `shares`."""
    x = rng.choice(3, n, p=shares) * 1.5 + rng.normal(size=n)
    weighted = PRIOR * np.exp(-((x[:, None] - 1.5 * np.arange(3)) ** 2) / 2)
    return weighted / weighted.sum(axis=1, keepdims=True)


def test_em_finds_the_shares_as_quapy_does():
    given = posteriors(20_000, SHARES, np.random.default_rng(1))
    found = em_shares(given, PRIOR)
    assert found.converged
    np.testing.assert_allclose(found.shares, SHARES, atol=0.02)
    oracle, _ = EMQ.EM(PRIOR, given, epsilon=1e-7)
    np.testing.assert_allclose(found.shares, oracle, atol=1e-4)


def test_calibrated_em_repairs_scores_that_em_is_misled_by():
    """The scores are three times too sharp and say class 2 too seldom."""
    rng = np.random.default_rng(4)
    misled = 3 * np.log(posteriors(20_000, SHARES, rng)) + [0, 0, -2]
    counts = [4000, 2000, 2000]
    known = np.vstack([posteriors(n, one, rng) for n, one in zip(counts, np.eye(3), strict=True)])
    targets = np.repeat(np.arange(3), counts)
    found = calibrated_posteriors(3 * np.log(known) + [0, 0, -2], targets, misled)
    # Under uniform shares, so the scores' own prior is gone too.
    even = np.ones(3)
    np.testing.assert_allclose(em_shares(found, even).shares, SHARES, atol=0.03)
    plain = np.exp(misled) / np.exp(misled).sum(axis=1, keepdims=True)
    assert np.abs(em_shares(plain, PRIOR).shares - SHARES).max() > 0.1


def test_calibration_agrees_with_scikit_learn_on_a_temperature_and_a_bias():
    """Of two classes it is logistic regression of the difference, but for the ridge on the bias."""
    rng = np.random.default_rng(5)
    labels = np.repeat([0, 1], 2000)
    score = rng.normal(size=4000) + 2.0 * labels
    scores = np.stack([np.zeros(4000), score], axis=1)
    found = calibrated_posteriors(scores, labels, scores)
    oracle = LogisticRegression(C=1e6).fit(score[:, None], labels).predict_proba(score[:, None])
    np.testing.assert_allclose(found, oracle, atol=0.01)


def test_a_pseudo_image_keeps_classes_that_nothing_speaks_for():
    given = np.tile([1.0, 0.0], (8, 1))
    np.testing.assert_allclose(em_shares(given, np.ones(2), pseudo_images=1).shares, [0.9, 0.1])


def test_calibration_without_images_of_a_class_stays_finite():
    rng = np.random.default_rng(6)
    found = calibrated_posteriors(rng.normal(size=(20, 3)), np.zeros(20, int), np.eye(3))
    assert np.isfinite(found).all() and (found > 0).all()


def test_em_says_when_it_did_not_converge(monkeypatch):
    monkeypatch.setattr(point_shares, "MOST_ITERATIONS", 2)
    given = posteriors(100, SHARES, np.random.default_rng(1))
    assert not em_shares(given, PRIOR).converged


def test_em_with_a_class_that_training_did_not_have():
    given = posteriors(1000, SHARES, np.random.default_rng(1))
    found = em_shares(np.hstack([given, np.zeros((1000, 1))]), np.append(PRIOR, 0.0))
    assert np.isfinite(found.shares).all() and found.shares[3] < 1e-6


def test_black_box_shares_are_quapys_adjusted_counts():
    rng = np.random.default_rng(2)
    for classes in (2, 5, 20):
        rates = 0.7 * np.eye(classes) + 0.3 * rng.dirichlet(np.ones(classes), classes)
        confusion = np.stack([rng.multinomial(80, row) for row in rates])
        predicted = rng.multinomial(3000, rng.dirichlet(np.full(classes, 0.3)) @ rates)
        oracle = ACC.solve_adjustment(
            (confusion / confusion.sum(axis=1, keepdims=True)).T,
            predicted / predicted.sum(),
            method="inversion",
            solver="exact-raise",
        )
        oracle = quapy_functional.normalize_prevalence(oracle, method="mapsimplex")
        np.testing.assert_allclose(black_box_shares(confusion, predicted), oracle, atol=1e-9)


def test_black_box_shares_with_a_class_that_validation_lacks():
    confusion = np.array([[8, 2, 0], [1, 9, 0], [0, 0, 0]])
    np.testing.assert_allclose(black_box_shares(confusion, np.array([8, 2, 10])), [0.5, 0, 0.5])


@pytest.mark.parametrize("point", [[0.2, 0.3, 0.5], [2.0, -1.0, 0.5], [-3.0, -3.0, -3.0], [5.0]])
def test_projection_is_quapys(point):
    expected = quapy_functional.projection_simplex_sort(np.array(point))
    np.testing.assert_allclose(project_to_simplex(np.array(point)), expected, atol=1e-12)
