"""What is measured and said of a period."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simpro_fast.training.metrics import Meter, ThresholdWatch


@pytest.mark.parametrize(
    ("kept", "threshold", "warnings"),
    [
        ([0.0] * 4, 0.95, 0),
        ([0.0] * 5, 0.95, 1),
        ([0.0] * 10, 0.95, 2),
        ([0.0] * 4 + [0.1] + [0.0] * 4, 0.95, 0),
        ([0.0] * 10, 2.0, 0),
    ],
)
def test_a_threshold_that_nothing_passes_is_named(
    kept: list[float], threshold: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    watch = ThresholdWatch(threshold)
    for share in kept:
        watch.period(share)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings
    assert all("method.threshold=0.95" in text for text in said)


def test_every_class_has_its_mask_rate_and_precision() -> None:
    """Against counting image by image; class 3 is never predicted, class 2 never kept."""
    generator = torch.Generator().manual_seed(0)
    meter = Meter(torch.device("cpu"), 4)
    ranks: Any = SimpleNamespace(sum=lambda values: values)
    rows: list[tuple[int, bool, int]] = []
    for _ in range(3):
        labels = torch.randint(0, 3, (64,), generator=generator)
        mask = (torch.rand(64, generator=generator) < 0.6) & (labels != 2)
        truth = torch.randint(-1, 4, (64,), generator=generator)
        rows += zip(labels.tolist(), mask.tolist(), truth.tolist(), strict=True)
        zero = torch.zeros(())
        losses = dict.fromkeys(("loss", "loss_labeled", "loss_unlabeled", "mask_rate"), zero)
        out: Any = SimpleNamespace(**losses, mask=mask, pseudo_labels=labels)
        meter.add(out, truth)
    row = meter.finish(ranks)
    for k in range(4):
        kept = [(truth == k, truth >= 0) for label, mask, truth in rows if label == k and mask]
        known = [right for right, is_known in kept if is_known]
        predicted = sum(label == k for label, _, _ in rows)
        rate, right = row["mask_rate_per_class"][k], row["pseudo_label_accuracy_per_class"][k]
        assert rate == (pytest.approx(len(kept) / predicted) if predicted else None)
        assert right == (pytest.approx(100 * sum(known) / len(known)) if known else None)
    assert row["mask_rate_per_class"][2:] == [0.0, None]
    again = meter.finish(ranks)
    assert again["mask_rate_per_class"] == [None] * 4, "sums of a period are its own"
