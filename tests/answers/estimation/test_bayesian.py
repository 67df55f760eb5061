import numpy as np
import pytest
import scipy.stats

from simpro_fast.answers.estimation import bayesian
from simpro_fast.answers.estimation.bayesian import bayesian_shares, row_prior, split_r_hat


def exact_sample(confusion, predicted, rng, draws=200_000, kept=20_000):
    """Draws of the images' shares from the posterior, by another way than Gibbs.

    With q = shares @ rates in place of the shares, rates and q are independent but for the Jacobian
    1 / |det rates| and for the shares having to be positive, so those two are the weights.
    """
    weights = confusion + row_prior(len(confusion))
    rates = rng.standard_gamma(np.broadcast_to(weights, (draws, *confusion.shape)))
    rates /= rates.sum(axis=2, keepdims=True)
    q = rng.dirichlet(predicted + 1, draws)
    shares = np.linalg.solve(rates.swapaxes(1, 2), q[:, :, None])[:, :, 0]
    weights = (shares >= 0).all(axis=1) / np.abs(np.linalg.det(rates))
    chosen = rng.choice(draws, kept, p=weights / weights.sum())
    joint = shares[chosen, :, None] * rates[chosen]  # true, predicted
    by_predicted = (joint / joint.sum(axis=1, keepdims=True)).swapaxes(1, 2)
    return rng.multinomial(predicted, by_predicted).sum(axis=1) / predicted.sum()


@pytest.mark.parametrize(
    ("confusion", "predicted"),
    [
        ([[40, 10], [5, 45]], [30, 70]),
        ([[8, 2], [4, 6]], [50, 3]),
        ([[20, 5, 5], [2, 26, 2], [6, 1, 13]], [60, 25, 35]),
        ([[6, 1, 1], [0, 9, 0], [1, 2, 4]], [5, 20, 1]),
    ],
)
def test_gibbs_sampling_gives_the_exact_posterior(confusion, predicted, monkeypatch):
    monkeypatch.setattr(bayesian, "ENOUGH_R_HAT", 1.004)
    confusion, predicted = np.array(confusion), np.array(predicted)
    found = bayesian_shares(confusion, predicted, seed=3)
    shares = exact_sample(confusion, predicted, np.random.default_rng(0))
    np.testing.assert_allclose(found.estimate, shares.mean(axis=0), atol=0.02)
    for k, (low, high) in enumerate(zip(found.low, found.high, strict=True)):
        # The ends of a shortest interval are not sharp, but it holds 95 % and none shorter does.
        ordered = np.sort(shares[:, k])
        held = np.mean((ordered >= low - 1e-9) & (ordered <= high + 1e-9))
        assert held == pytest.approx(0.95, abs=0.025)
        count = int(0.95 * len(ordered))
        assert high - low <= (ordered[count:] - ordered[:-count]).min() + 0.03


def test_shares_are_those_of_these_images():
    """A network that has made no error leaves little doubt about a hundred images."""
    found = bayesian_shares(np.diag([100, 100]), np.array([50, 50]), seed=1)
    assert (found.high - found.low < 0.05).all() and found.consistent
    absent = bayesian_shares(np.diag([100, 100]), np.array([100, 0]), seed=1)
    assert absent.low[1] == 0 and absent.high[0] == 1


@pytest.mark.parametrize("classes", [2, 70])
def test_of_images_that_were_not_classified_only_the_source_is_known(classes):
    """A network without an error on 200 of 10,000 images: the exact posterior is beta-binomial."""
    predicted = np.full(classes, 200 // classes)
    predicted[0] += 200 - predicted.sum()
    found = bayesian_shares(10**6 * np.eye(classes, dtype=int), predicted, seed=1, unseen=9800)
    a, b = predicted[0] + 1, 200 - predicted[0] + classes - 1
    others = scipy.stats.betabinom(9800, a, b)
    assert found.estimate[0] == pytest.approx((predicted[0] + others.mean()) / 10_000, rel=0.1)
    held = others.cdf(1e4 * found.high[0] - predicted[0]) - others.cdf(
        1e4 * found.low[0] - predicted[0] - 1
    )
    assert held == pytest.approx(0.95, abs=0.03)


def test_counts_that_contradict_the_validation_images_are_noticed():
    found = bayesian_shares(np.array([[50, 0], [50, 0]]), np.array([10, 90]), seed=0)
    assert not found.consistent


def imagined(rng, classes, per_class, images):
    """Shares, confusion matrix and predicted counts of one imagined network and its images."""
    shares = rng.permutation(20.0 ** -(np.arange(classes) / (classes - 1)))
    shares /= shares.sum()
    rates = 0.7 * np.eye(classes) + 0.3 * rng.dirichlet(np.full(classes, 0.5), classes)
    confusion = np.stack([rng.multinomial(per_class, row) for row in rates])
    return shares, confusion, rng.multinomial(images, shares @ rates)


@pytest.mark.slow
def test_intervals_cover_the_shares_of_imagined_sets():
    rng, covered = np.random.default_rng(5), []
    for seed in range(12):
        shares, confusion, predicted = imagined(rng, 5, 30, 400)
        found = bayesian_shares(confusion, predicted, seed=seed)
        assert found.converged
        assert found.estimate.sum() == pytest.approx(1)
        assert (found.low <= found.estimate).all() and (found.estimate <= found.high).all()
        covered.append((found.low <= shares) & (shares <= found.high))
    # 60 shares at 95 %, those of one set dependent: four standard errors
    assert np.mean(covered) >= 0.84


def test_the_result_is_a_function_of_seed_and_counts():
    _, confusion, predicted = imagined(np.random.default_rng(1), 4, 30, 500)
    first, again, other = (bayesian_shares(confusion, predicted, seed=s) for s in (1, 1, 2))
    assert first.low.tolist() == again.low.tolist()
    assert first.low.tolist() != other.low.tolist()
    np.testing.assert_allclose(first.estimate, other.estimate, atol=0.02)


def test_ten_million_images_are_as_good_as_ten_thousand_of_the_same_counts():
    shares, confusion, _ = imagined(np.random.default_rng(1), 4, 50, 1)
    rates = confusion / confusion.sum(axis=1, keepdims=True)
    few, many = (np.round(n * (shares @ rates)).astype(int) for n in (10_000, 10_000_000))
    small, large = (bayesian_shares(confusion, n, seed=1) for n in (few, many))
    np.testing.assert_allclose(small.low, large.low, atol=0.01)
    np.testing.assert_allclose(small.high, large.high, atol=0.01)


def test_a_class_without_validation_images_has_a_wide_interval():
    confusion = np.array([[50, 5, 0], [5, 50, 0], [0, 0, 0]])
    found = bayesian_shares(confusion, np.array([100, 100, 100]), seed=1)
    assert found.low[2] < 1 / 3 < found.high[2]
    known = bayesian_shares(confusion + np.diag([0, 0, 55]), np.array([100] * 3), seed=1)
    assert known.high[2] - known.low[2] < 0.8 * (found.high[2] - found.low[2])


def test_r_hat_tells_chains_apart():
    rng = np.random.default_rng(0)
    together = rng.normal(size=(4, 500, 2))
    assert split_r_hat(together) < 1.02
    assert split_r_hat(together + np.array([0, 0, 0, 1.0])[:, None, None]) > 1.1
    assert split_r_hat(together + np.linspace(0, 2, 500)[:, None]) > 1.1


def test_many_classes_have_intervals_as_well():
    shares, confusion, predicted = imagined(np.random.default_rng(3), 100, 20, 20_000)
    found = bayesian_shares(confusion, predicted, seed=1)
    assert found.sampler == "independent" and found.estimate.sum() == pytest.approx(1)
    # 100 shares at 95 %, dependent: four standard errors
    assert np.mean((found.low <= shares) & (shares <= found.high)) >= 0.86
