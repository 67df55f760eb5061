"""What is measured and said of a period."""

from __future__ import annotations

import pytest

from simpro_fast.training.metrics import ThresholdWatch


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
