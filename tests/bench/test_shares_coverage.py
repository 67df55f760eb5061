"""The parts of the coverage bench that decide what its table says."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import shares_coverage


def test_a_fresh_set_holds_nothing_that_was_used() -> None:
    labels = np.repeat(np.arange(3), (100, 50, 20))
    used = np.concatenate([np.arange(60), np.arange(100, 130)])
    rng = np.random.default_rng(0)
    rows = shares_coverage.fresh_rows(labels, used, np.array([40, 40, 10]), rng)
    assert not np.intersect1d(rows, used).size and len(np.unique(rows)) == len(rows)
    assert np.bincount(labels[rows]).tolist() == [20, 20, 5], "class 1 has 20 left of 40"


def test_the_table_is_that_of_the_lines() -> None:
    """As in the committed results, so that an edited table is noticed."""
    text = shares_coverage.RESULTS.with_suffix(".csv").read_text()
    lines: list[dict[str, Any]] = list(csv.DictReader(text.splitlines()))
    assert shares_coverage.table(lines) == shares_coverage.RESULTS.with_suffix(".md").read_text()
    assert len(lines) == 2 * 3 * len(shares_coverage.DISTRIBUTIONS)
    for kind in shares_coverage.KINDS:
        part = [line for line in lines if line["images_of"] == kind]
        covered, classes = (sum(int(r[key]) for r in part) for key in ("covered", "classes"))
        assert covered / classes >= 0.85
