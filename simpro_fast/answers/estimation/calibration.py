"""Intervals of accuracies, and how far probabilities can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import log_softmax, ndtri

BINS = 15
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0


def wilson_interval(correct: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a proportion (Wilson, JASA 1927), elementwise; NaN where count is 0."""
    z2 = float(ndtri(0.975)) ** 2
    correct, count = np.asarray(correct, np.float64), np.asarray(count, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = correct / count
        centre = (share + z2 / (2 * count)) / (1 + z2 / count)
        half = np.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count) / (1 + z2 / count)
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


def mean_interval(correct: np.ndarray, count: np.ndarray) -> tuple[float, float] | None:
    """95 % bounds of the mean m over classes of their accuracies p_k, of n_k images each.

    The Wilson interval of a proportion m of as many images as would have the same variance: with
    v = sum p_k (1 - p_k) / (n_k - 1) / K^2, the effective number is m (1 - m) / v. A class of one
    image has the variance of all images together; where v is 0 all images count.

    Args:
        correct, count: [K]; classes without images are left out.

    Returns:
        Shares of 1; None where no class has images.
    """
    present = np.asarray(count) > 0
    if not present.any():
        return None
    correct, count = np.asarray(correct)[present], np.asarray(count)[present]
    accuracy, pooled = correct / count, correct.sum() / count.sum()
    mean = float(accuracy.mean())
    one = count == 1
    spread = np.where(one, pooled * (1 - pooled), accuracy * (1 - accuracy))
    variance = float((spread / np.where(one, 1, count - 1)).sum()) / len(count) ** 2
    images = mean * (1 - mean) / variance if variance > 0 else float(count.sum())
    low, high = wilson_interval(np.array(mean * images), np.array(images))
    return float(low), float(high)


def chance_warning(confusion: Sequence[Sequence[int]] | np.ndarray | None) -> str | None:
    """What to say of a network that may as well guess; None where it is better than that.

    Whoever gives every image one class, or classes at random, has a mean accuracy over K classes of
    1 / K, whatever the images are; so that is chance, and the interval of the mean must lie above.

    Args:
        confusion: test images [K, K], rows true, columns predicted; None: nothing is known.
    """
    if confusion is None:
        return None
    correct, count = np.diag(confusion), np.sum(confusion, axis=1)
    present, bounds = count > 0, mean_interval(correct, count)
    if bounds is None or present.sum() < 2 or bounds[0] > (chance := 1 / int(present.sum())):
        return None
    mean = float((correct[present] / count[present]).mean())
    return (
        f"this network has not learned to tell the classes apart (mean accuracy of the classes "
        f"{100 * mean:.1f} %, {100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}; by chance "
        f"{100 * chance:.1f} %); pretrained weights, larger images or more labels help, and more "
        "steps while the accuracy rises"
    )


def expected_calibration_error(
    count: np.ndarray, confidence: np.ndarray, correct: np.ndarray
) -> float:
    """Mean over images of |accuracy - mean confidence| of their bin (Naeini et al., AAAI 2015).

    Args:
        count, confidence, correct: sums per bin of equal width of the largest probability, [bins].
    """
    return float(np.abs(np.asarray(correct) - np.asarray(confidence)).sum() / np.sum(count))


def fit_temperature(
    logits: np.ndarray,
    targets: np.ndarray,
    total: Callable[[float], float] = float,
) -> float | None:
    """T of the smallest negative log-likelihood of softmax(logits / T) (Guo et al., ICML 2017).

    In 1/T the likelihood is convex, so its derivative has one root.

    Args:
        logits: [n, K]. -inf is a class that cannot be.
        targets: [n], none of a class with -inf.
        total: sums a number over all ranks where each holds some of the images.

    Returns:
        None where there is no such T between 0.01 and 100: all images are classified rightly, or
        chance would do better.
    """
    targets = np.asarray(targets)
    scores = np.asarray(logits, np.float64)
    chosen = scores[np.arange(len(targets)), targets]
    finite = np.where(np.isfinite(scores), scores, 0.0)

    def slope(inverse: float) -> float:
        """Derivative of the negative log-likelihood by 1/T."""
        expected = (np.exp(log_softmax(inverse * scores, axis=1)) * finite).sum(axis=1)
        return total(float((expected - chosen).sum()))

    from scipy.optimize import brentq  # half a second, for every start of a training

    low, high = 1 / HIGHEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE
    if slope(low) >= 0 or slope(high) <= 0:
        return None
    return 1 / float(brentq(slope, low, high, xtol=1e-8, rtol=1e-8))
