"""The tables in bench/results are what their rows make."""

from __future__ import annotations

import pytest

from simpro_fast.config import load_config
from tests.conftest import ROOT


def test_tables_over_split_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import prior_rules
    import queue_rules
    import split_tables

    for table in split_tables.TABLES.values():
        for row, words in table.rows.items():
            load_config(
                str(table.config),
                [*split_tables.with_start((*words, *table.chosen.get(row, ())), table)],
            )
        assert set(table.chosen) <= set(table.rows)
        path = split_tables.RESULTS / f"splits_{table.name}.csv"
        if path.exists():
            found = split_tables.read(path)
            assert split_tables.markdown(table, found) == path.with_suffix(".md").read_text()
        rules = split_tables.RESULTS / f"prior_rules_{table.name}.csv"
        if rules.exists():
            found = split_tables.read(rules)
            assert prior_rules.markdown(found) == rules.with_suffix(".md").read_text()
    table_of_rules = queue_rules.ROWS.with_suffix(".md").read_text()
    assert queue_rules.markdown(queue_rules.rows()) == table_of_rules


def test_paired_differences_and_means_over_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a split seed counts once, and only where it has all distributions."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from split_tables import mean, of, over_distributions

    values = {
        ("A", "x", "1"): 3.0,
        ("A", "x", "2"): 5.0,
        ("A", "y", "1"): 1.0,
        ("A", "y", "2"): 9.0,
    }
    values |= {("B", "x", "1"): 1.0, ("B", "x", "2"): 1.0, ("B", "y", "1"): 2.0}
    found = {key: {"class_mean": value} for key, value in values.items()}
    cells = of(found, "A", "B", ["1", "2"], "class_mean", ("x", "y"))
    assert cells == [{"1": 2.0, "2": 4.0}, {"1": -1.0}]
    assert over_distributions(cells) == [0.5]
    assert mean([2.0, 4.0]) == "3.0 (1.0)" and mean([0.5]) == "0.5" and mean([]) == "-"
