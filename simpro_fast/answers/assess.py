"""Numbers of `evaluate`: a network under a class prior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from simpro_fast.answers.estimation.calibration import (
    fit_temperature,
    mean_interval,
    wilson_interval,
)
from simpro_fast.answers.evaluation import TEMPERATURE_NUMBERS, Tally, many_medium_few
from simpro_fast.answers.labeled import LabeledLogits
from simpro_fast.answers.model import TrainedModel

_ROWS = 4096


def assess(
    model: TrainedModel, found: LabeledLogits, prior: str | Sequence[float]
) -> dict[str, Any]:
    """Accuracies in percent with 95 % Wilson intervals, calibration and likelihood; JSON types.

    Args:
        prior: as in `TrainedModel.probabilities`.

    Returns:
        `top1`, `top_k_accuracy` and `class_mean`, each {value, low, high}; `per_class`, rows
        {class, images, correct, accuracy, low, high} with null for a class without images; `many`,
        `medium`, `few` by the labeled training images; `confusion` (null above 2,048 classes),
        `ece`, `reliability` (15 bins), `temperature` (null: none fits), `log_likelihood` (null: a
        class that occurs was ruled out).
    """
    tally = Tally(len(model.class_names), "cpu")
    for first in range(0, len(found.targets), _ROWS):
        rows = slice(first, first + _ROWS)
        logs = torch.as_tensor(_log_probabilities(model, found.logits[rows], prior))
        tally.add(logs, torch.as_tensor(found.targets[rows]))
    result = tally.evaluation()
    correct, count = result.correct.numpy(), result.count.numpy()
    low, high = wilson_interval(correct, count)
    per_class = result.per_class
    bounds = mean_interval(correct, count)
    assert bounds is not None  # at least one image
    train_counts = model.file.labeled_counts
    groups = (
        dict.fromkeys(("many", "medium", "few"))
        if train_counts is None
        else many_medium_few(per_class, train_counts)
    )
    matrix = result.confusion
    return {
        "top1": _share(int(correct.sum()), int(count.sum())),
        "top_k": result.top_k,
        "top_k_accuracy": _share(result.top_k_correct, int(count.sum())),
        "class_mean": dict(
            zip(("value", "low", "high"), (result.top1_class_mean, *_percent(bounds)), strict=True)
        ),
        **groups,
        "per_class": [
            {
                "class": name,
                "images": int(count[k]),
                "correct": int(correct[k]),
                "accuracy": per_class[k],
                "low": 100 * float(low[k]) if count[k] else None,
                "high": 100 * float(high[k]) if count[k] else None,
            }
            for k, name in enumerate(model.class_names)
        ],
        "ece": result.ece,
        "temperature": _temperature(model, found, prior),
        "log_likelihood": result.log_likelihood if np.isfinite(result.log_likelihood) else None,
        "reliability": result.reliability,
        "confusion": None if matrix is None else matrix.tolist(),
    }


def _log_probabilities(
    model: TrainedModel, logits: np.ndarray, prior: str | Sequence[float]
) -> np.ndarray:
    """float64 [n, K]; plain logits for `none`, whose ties and argmax are those of the training."""
    if prior == "none":
        return logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.log(model.probabilities(logits, prior))


def _temperature(
    model: TrainedModel, found: LabeledLogits, prior: str | Sequence[float]
) -> float | None:
    """Fitted to every n-th image where there are very many."""
    every = -(-found.logits.size // TEMPERATURE_NUMBERS)
    targets = found.targets[::every]
    logs = _log_probabilities(model, found.logits[::every], prior)
    if not np.isfinite(logs[np.arange(len(targets)), targets]).all():
        return None
    return fit_temperature(logs, targets)


def _share(correct: int, count: int) -> dict[str, float]:
    low, high = wilson_interval(np.array(correct), np.array(count))
    bounds = _percent((correct / count, float(low), float(high)))
    return dict(zip(("value", "low", "high"), bounds, strict=True))


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]
