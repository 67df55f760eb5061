"""The tables in bench/results are what their rows make."""

from __future__ import annotations

import json

import pytest

from simpro_fast.config import load_config
from tests.conftest import ROOT


def test_committed_studies_are_of_rows_that_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import studies

    rows = studies.read_rows("studies")
    assert {row["row"] for row in rows} <= set(studies.ORDER)
    written = (studies.RESULTS / "studies.md").read_text(encoding="utf-8")
    assert rows and studies.table(rows) == written
    for changes in studies.ROWS.values():
        load_config("fashion_mnist_lt/reversed", list(changes))


def test_committed_rows_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows in bench/results are what its tables are made of."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import experiment

    for name in (
        *("digits_lt", "fashion_mnist_lt", "fashion_mnist_lt_14px_800"),
        "fashion_mnist_lt_balanced",
    ):
        rows = experiment.read_rows(name)
        written = (experiment.RESULTS / f"{name}.md").read_text(encoding="utf-8")
        assert rows and experiment.table(rows) == written
    assert {row["method"] for row in experiment.read_rows("fashion_mnist_lt_14px_800")} <= {
        *experiment.METHODS
    }
    cells = [("reversed", "simpro", 1), ("reversed", "fixmatch", 2)]
    found = experiment.members("digits_lt", cells, 1, "_balanced", experiment.BALANCED)
    assert [str(found[cell]) for cell in cells] == [
        f"digits_lt/reversed_balanced/method.name-{method} seed {seed}" for _, method, seed in cells
    ]
    assert json.dumps(found[cells[0]].overrides).count("name=digits") == 1
