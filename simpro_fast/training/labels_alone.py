"""What the labeled images alone give on cached features: the numbers that training must beat."""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import recall_score

from simpro_fast.data.features import FeatureDataset
from simpro_fast.training.setup import Setup

PROBE, NEIGHBOUR = "probe_class_mean", "neighbour_class_mean"
"""Keys of summary.json: mean over the classes of the test accuracy, percent."""
MOST_VALUES = 20_000_000
"""Labeled images x classes up to which the probe is fitted, in a minute at most."""


def labels_alone(setup: Setup) -> dict[str, float | None]:
    """Test accuracy of two classifiers on view 0 of the labeled images; {} without features.

    PROBE is logistic regression (scikit-learn's C = 1, features of the length that the head sees)
    under uniform class shares: its log-probabilities less the log of the labeled shares, the
    logit adjustment of Menon et al. (2021). NEIGHBOUR is the label of the labeled image with the
    largest cosine. None: it would take too long, or there is one class only.
    """
    dataset, split = setup.dataset, setup.split
    if not isinstance(dataset, FeatureDataset) or not len(split.test):
        return {}
    rows, (images, truth) = split.own_labeled, dataset.test_part
    labels, true = dataset.labels[rows], truth[split.test]
    known = dataset.features.scale * dataset.images[rows].astype(np.float32)
    asked = dataset.features.scale * images[split.test].astype(np.float32)

    def class_mean(predicted: np.ndarray) -> float:
        found = recall_score(true, predicted, labels=np.unique(true), average="macro")
        return 100 * float(found)

    unit = known / np.maximum(np.linalg.norm(known, axis=1, keepdims=True), 1e-12)
    nearest = [(block @ unit.T).argmax(1) for block in np.array_split(asked, len(asked) // 512 + 1)]
    probe: float | None = None
    if len(known) * dataset.num_classes <= MOST_VALUES and len(np.unique(labels)) > 1:
        fitted = LogisticRegression(max_iter=300)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # near enough for a comparison
            fitted.fit(known, labels)
        shares = np.bincount(labels, minlength=dataset.num_classes)[fitted.classes_] / len(labels)
        adjusted = fitted.predict_log_proba(asked) - np.log(shares)
        probe = class_mean(fitted.classes_[adjusted.argmax(1)])
    return {PROBE: probe, NEIGHBOUR: class_mean(labels[np.concatenate(nearest)])}
