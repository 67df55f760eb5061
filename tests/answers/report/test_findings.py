"""The sentence that a run ends with, and its warnings."""

from __future__ import annotations

from typing import Any

import pytest

from simpro_fast.answers.report.findings import finding, intervals, shared_warnings
from tests.answers.report.small_runs import make_summary

SHARES = [0.05, 0.1, 0.3, 0.55]


def shares(
    shares: list[float] = SHARES, half: float = 0.02, names: list[Any] | None = None
) -> dict[str, Any]:
    rows = [
        {"class": name, "estimate": share, "low": max(0.0, share - half), "high": share + half}
        for name, share in zip(names or range(4), shares, strict=True)
    ]
    return {"method": "bayesian", "images": 1500, "rows": rows}


def summary(**values: Any) -> dict[str, Any]:
    return make_summary(**{"pi_u": SHARES, "pi_u_true": None, "kl_pi_u": None, **values})


def test_the_frequent_classes_are_named_with_their_intervals() -> None:
    found = finding(summary(shares=shares()))
    assert found is not None and found.warnings == ()
    assert found.sentence == (
        "The unlabeled images are mostly class name3 (55 %, 53 to 57) and class name2 (30 %, 28 to "
        "32)."
    )
    by_name = summary(shares=shares(names=[f"name{k}" for k in range(4)]))
    assert finding(by_name) == found


def test_a_class_is_not_called_frequent_before_its_interval_shows_it() -> None:
    """As of a run that failed: some intervals lie apart, none above an even share."""
    found = finding(summary(shares=shares([0.01, 0.2, 0.37, 0.42], 0.2)))
    assert found is not None and "cannot be told apart yet" in found.sentence
    one = finding(summary(shares=shares([0.01, 0.2, 0.25, 0.54], 0.2)))
    assert one is not None and one.sentence.endswith("mostly class name3 (54 %, 34 to 74).")


def test_a_truth_that_is_known_stands_beside_it() -> None:
    found = finding(summary(shares=shares(), pi_u_true=[0.1, 0.2, 0.3, 0.4]))
    assert found is not None and found.sentence.endswith("; in truth these have 40 % and 30 %.")


def test_even_shares_are_not_called_mostly_one_class() -> None:
    found = finding(summary(pi_u=[0.24, 0.25, 0.25, 0.26]))
    assert found is not None
    assert "spread over all classes" in found.sentence and "mostly" not in found.sentence
    assert "name3 (26 %)" in found.sentence and found.sentence.startswith("By pi_u")
    even = [0.24, 0.25, 0.25, 0.26]
    sharp, wide = (finding(summary(shares=shares(even, half))) for half in (0.05, 0.3))
    assert sharp is not None and sharp.sentence.startswith("The unlabeled images are spread over")
    assert wide is not None and "cannot be told apart yet" in wide.sentence
    high = finding(summary(shares=shares([0.2, 0.2, 0.2, 0.4], 0.3)))
    assert high is not None and high.sentence == wide.sentence, "every interval holds 0.25"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "no intervals"),
        ({"shares": {**shares(), "rows": shares()["rows"][:3]}}, "no intervals"),
        ({"shares": {**shares(), "converged": False}}, "has not converged"),
        ({"shares": {**shares(), "consistent": False}}, "contradict the test images"),
        (
            {"shares": shares(), "confusion": [[0, 9, 0, 0]] * 4},
            "has not learned to tell the classes apart",
        ),
        (
            {"shares": shares(), "labeled_counts": [90, 50, 4, 2]},
            "name2 and class name3: fewer than 5",
        ),
        (
            {"shares": shares(), "pi_u_true": [0.25, 0.25, 0.3, 0.2], "kl_pi_u": 0.4},
            "a uniform guess is closer",
        ),
    ],
)
def test_an_estimate_that_is_not_to_be_trusted_is_warned_of(
    values: dict[str, Any], told: str
) -> None:
    found = finding(summary(**values))
    assert found is not None
    assert any(told in text for text in found.warnings), found.warnings
    assert len(found.warnings) == 1


def test_nothing_is_said_before_there_is_an_estimate() -> None:
    assert finding(summary(pi_u=None)) is None
    assert intervals(summary(shares=None)) is None


def test_what_all_are_warned_of_is_said_once() -> None:
    few = finding(summary(shares=shares(), labeled_counts=[90, 50, 4, 2]))
    bare = finding(summary(labeled_counts=[90, 50, 4, 2]))
    assert few is not None and bare is not None
    assert shared_warnings([few, None, bare]) == list(few.warnings)
    assert shared_warnings([bare]) == []
