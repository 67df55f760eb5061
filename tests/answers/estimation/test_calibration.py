import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from scipy.stats import binomtest
from sklearn.metrics import log_loss

from simpro_fast.answers.estimation.calibration import (
    chance_warning,
    expected_calibration_error,
    fit_temperature,
    mean_interval,
    wilson_interval,
)


def test_wilson_interval_is_scipys():
    cases = [(0, 1), (1, 1), (0, 50), (7, 50), (50, 50), (4321, 10_000)]
    low, high = wilson_interval(*np.array(cases).T)
    for place, case in enumerate(cases):
        expected = binomtest(*case).proportion_ci(0.95, method="wilson")
        assert (low[place], high[place]) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert np.isnan(wilson_interval(np.array([0]), np.array([0]))).all()


def test_interval_of_the_class_mean_covers_and_ignores_absent_classes():
    rng, truth = np.random.default_rng(0), np.array([0.98, 0.9, 0.5, 0.75])
    count = np.array([20, 200, 50, 30])
    inside = []
    for _ in range(2000):
        low, high = mean_interval(rng.binomial(count, truth), count)
        inside.append(low <= truth.mean() <= high)
    assert 0.93 <= np.mean(inside) <= 0.98
    # One class of ten images: as good as nine, for the variance of its accuracy is not known.
    assert mean_interval([5, 0], [10, 0]) == pytest.approx(
        tuple(float(b) for b in wilson_interval(4.5, 9))
    )
    low, high = mean_interval([1, 1, 0], [1, 1, 1])  # the variance of all images together
    assert low < 2 / 3 < high and high - low > 0.5
    assert mean_interval([7, 7], [7, 7])[1] == 1
    assert mean_interval([0, 0], [0, 0]) is None


def test_a_network_that_may_as_well_guess_is_said_to():
    rng = np.random.default_rng(0)
    one_class = np.zeros((4, 4), int)
    one_class[:, 2] = (80, 40, 10, 5)
    assert "by chance 25.0 %" in chance_warning(one_class)
    guesses = rng.multinomial([50, 20, 20, 10], np.full((4, 4), 0.25))
    assert "has not learned" in chance_warning(guesses)
    learned = rng.multinomial([50, 20, 20, 10], 0.3 * np.eye(4) + 0.175)
    assert chance_warning(learned) is None
    assert chance_warning(None) is None and chance_warning([[5, 0], [0, 0]]) is None


def test_calibration_error_by_hand():
    # two bins: 4 images, 3 right, said 0.6 each; 6 images, 6 right, said 0.9 each
    error = expected_calibration_error([4, 0, 6], [2.4, 0, 5.4], [3, 0, 6])
    assert error == pytest.approx(0.4 * 0.15 + 0.6 * 0.1)


def overconfident(n: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(n, 5)) * 2
    cumulated = np.exp(log_softmax(logits, axis=1)).cumsum(axis=1)
    return 3 * logits, (rng.uniform(size=(n, 1)) > cumulated).sum(axis=1)


def test_temperature_is_that_of_the_smallest_loss():
    logits, targets = overconfident()
    found = fit_temperature(logits, targets)
    assert found == pytest.approx(3, abs=0.2)

    def loss(temperature: float) -> float:
        return log_loss(targets, np.exp(log_softmax(logits / temperature, axis=1)))

    oracle = minimize_scalar(loss, bounds=(0.5, 10), method="bounded", options={"xatol": 1e-6})
    assert found == pytest.approx(oracle.x, abs=1e-4)
    shut = np.hstack([logits, np.full((len(logits), 1), -np.inf)])
    assert fit_temperature(shut, targets) == pytest.approx(found, abs=1e-6)


def test_temperature_of_the_undecided():
    logits = np.array([[2.0, 0.0], [0.0, 3.0]])
    assert fit_temperature(logits, np.array([0, 1])) is None  # all right: the colder the better
    assert fit_temperature(logits, np.array([1, 0])) is None  # all wrong: the warmer the better
    assert fit_temperature(np.zeros((0, 2)), np.array([], int), total=lambda x: x + 0.0) is None
