"""Images per class of long-tailed splits: the rules of the released SimPro code."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import labeled_share
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)


def long_tailed_counts(n_max: int, gamma: float, num_classes: int) -> list[int]:
    """Images per class, head first: floor(n_max * gamma^(-k / (K-1))).

    Args:
        n_max: images of class 0.
        gamma: imbalance ratio, class 0 over class K-1; at least 1.
        num_classes: K, at least 2.

    Raises:
        ConfigError: gamma < 1, or a single class.
    """
    if not gamma >= 1:
        raise ConfigError(f"gamma={gamma:g}: an imbalance ratio is at least 1 (1 is balanced)")
    if num_classes < 2:
        raise ConfigError(f"{num_classes} class: a long-tailed split needs at least 2")
    rate = (1 / gamma) ** (1 / (num_classes - 1))
    # The last class is computed without the power, whose rounding could lose one image.
    return [int(n_max * rate**k) for k in range(num_classes - 1)] + [int(n_max / gamma)]


def unlabeled_counts(
    distribution: str, m_max: int, gamma: float, num_classes: int, seed: int
) -> list[int]:
    """Unlabeled images per class for one of the named distributions.

    Args:
        distribution: `consistent` (head first), `uniform` (m_max of each class, whatever gamma),
            `reversed` (tail first), `middle` (most frequent in the middle), `head_tail` (most
            frequent at both ends) or `random` (a shuffle that is a pure function of `seed`).
        m_max: images of the most frequent class.
        gamma: imbalance ratio of the unlabeled set.
        num_classes: K.
        seed: the run's seed.
    """
    if distribution == "uniform":
        return long_tailed_counts(m_max, 1.0, num_classes)
    counts = long_tailed_counts(m_max, gamma, num_classes)
    even, odd = list(range(0, num_classes, 2)), list(range(1, num_classes, 2))
    if distribution == "random":
        random.Random(seed).shuffle(counts)
        return counts
    ranks = {
        "consistent": list(range(num_classes)),
        "reversed": list(range(num_classes))[::-1],
        "middle": even[::-1] + odd,
        "head_tail": odd + even[::-1],
    }
    if distribution not in ranks:
        raise ConfigError(
            f"data.unlabeled_distribution={distribution!r} is unknown; "
            f"known: {', '.join(ranks)}, uniform, random"
        )
    return [counts[rank] for rank in ranks[distribution]]


def wanted_counts(
    data: DataConfig, available: Sequence[int], class_names: Sequence[str], seed: int
) -> tuple[list[int], list[int]]:
    """Labeled and unlabeled images per class that the configuration asks for.

    With `labeled_fraction` every class is divided into the two. With `total_max` as well, only
    the first images of each class are, as many as a long tail from `total_max` at ratio
    `gamma_labeled` gives: the labeled ones are the fraction, rounded down, of that count, and the
    unlabeled ones the rest, or what there is of it where the class holds fewer (ImageNet-1k-LT).

    Args:
        data: the configuration.
        available: images of each class that are not held out for testing.
        class_names: for the message about classes that hold fewer.
        seed: the run's seed.

    Raises:
        ConfigError: gamma < 1, one class, or keys that contradict each other.
    """
    num_classes, gamma = len(available), data.gamma_labeled
    if data.labeled_fraction is None:
        if data.unlabeled_distribution == "uniform" and data.gamma_unlabeled not in (None, 1):
            raise ConfigError(
                f"data.gamma_unlabeled={data.gamma_unlabeled:g} contradicts "
                "data.unlabeled_distribution=uniform; leave one of them out"
            )
        gamma_unlabeled = gamma if data.gamma_unlabeled is None else data.gamma_unlabeled
        return long_tailed_counts(data.labeled_max, gamma, num_classes), unlabeled_counts(
            data.unlabeled_distribution, data.unlabeled_max, gamma_unlabeled, num_classes, seed
        )
    if data.total_max is None:
        totals = list(available)
        labeled = [labeled_share(n, data.labeled_fraction) for n in totals]
    else:
        listed = long_tailed_counts(data.total_max, gamma, num_classes)
        labeled = [int(data.labeled_fraction * n) for n in listed]
        totals = [min(pair) for pair in zip(listed, available, strict=True)]
        short = [k for k in range(num_classes) if totals[k] < listed[k]]
        if short:
            k = short[0]
            logger.warning(
                "%d of %d classes hold fewer images than the long tail asks for (class %d, %s: %d "
                "wanted, %d found); these have fewer unlabeled images",
                len(short),
                num_classes,
                k,
                class_names[k],
                listed[k],
                available[k],
                extra=FOUND_BY_ALL,
            )
    return labeled, [max(0, total - n) for total, n in zip(totals, labeled, strict=True)]
