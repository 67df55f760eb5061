"""What the bench of estimated class distributions says of a run, and what it leaves out."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import finished_runs
import numpy as np
import prior_estimates
import pytest
from experiment import DISTRIBUTIONS, METHODS

from simpro_fast.answers.model import load_model
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.split import load_split
from simpro_fast.utils.errors import ConfigError, UserError
from tests.answers.trained import train

FEW = 5
"""Images of each class to calibrate with; the tiny test part has ten."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a finished run of 3 periods, the last of 2 steps."""
    folder = tmp_path_factory.mktemp("priors")
    return train(folder, name="digits_lt/reversed_tiny/method.name-simpro", seed=2)


@pytest.fixture
def look(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the bench on it; returns what it printed, and the rows of the results."""
    monkeypatch.setattr(finished_runs, "PER_CLASS", FEW)

    def main(capsys: Any, *arguments: str) -> tuple[str, list[dict[str, str]]]:
        where = ["--runs", str(run.output_dir), "--name", "digits_lt", "--kind", "_tiny"]
        words = ["prior_estimates.py", *where, "--results", str(tmp_path / "priors"), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        assert prior_estimates.main() == 0
        text = (tmp_path / "priors.csv").read_text(encoding="utf-8")
        return capsys.readouterr().out, list(csv.DictReader(text.splitlines()))

    return main


def em_by_loop(posteriors: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Saerens et al., eq. 2.9, one image and class at a time."""
    shares = prior / prior.sum()
    for _ in range(300):
        new = np.zeros_like(shares)
        for row in posteriors:
            joint = [p * s / q for p, s, q in zip(row, shares, prior / prior.sum(), strict=True)]
            new += np.array(joint) / sum(joint)
        shares = new / len(posteriors)
    return shares


def test_a_line_says_what_the_files_of_the_run_say(run: Any, look: Any, capsys: Any) -> None:
    _, (line,) = look(capsys)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (line["distribution"], line["method"], line["seed"]) == ("reversed", "simpro", "2")
    assert (line["set"], line["estimate"], line["steps"]) == ("digits_lt_tiny", "own", "12")
    assert float(line["kl_last"]) == round(summary["kl_pi_u"], 4)
    truth, pi_u = np.array(summary["pi_u_true"]), np.array(summary["pi_u"])
    assert float(line["l1_last"]) == pytest.approx(abs(truth - pi_u).sum(), abs=1e-4)
    assert float(line["l1_uniform"]) == pytest.approx(abs(truth - 0.1).sum(), abs=1e-4)
    assert line["kl_5"] == "", "the run has three periods"
    assert line["calibrated_with"] == "50"

    dataset, split, model = load_dataset(run.data), load_split(run.run_dir), load_model(run.run_dir)
    assert model.file.tau == 1
    logits = model.logits(dataset.images[split.unlabeled]).double()
    phi = np.array(model.file.phi)
    shares = em_by_loop((logits + np.log(phi)).softmax(1).numpy(), phi)
    assert float(line["l1_em"]) == pytest.approx(abs(truth - shares).sum(), abs=2e-3)


def test_calibration_images_are_of_the_test_part_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_runs, "PER_CLASS", FEW)
    opened = finished_runs.open_run(run.run_dir)
    found = finished_runs.calibrate(opened, np.random.default_rng(0))
    assert np.bincount(found.targets).tolist() == [FEW] * 10
    assert found.confusion.sum(axis=1).tolist() == [FEW] * 10
    right = (found.logits.argmax(axis=1) == found.targets).sum()
    assert found.confusion.trace() == right
    everything = opened.logits(opened.dataset.test_part[0], opened.split.test)
    assert {row.tobytes() for row in found.logits.round(3)} <= {
        row.tobytes() for row in everything.round(3)
    }


def test_too_small_a_test_part_is_refused(run: Any) -> None:
    opened = finished_runs.open_run(run.run_dir)
    with pytest.raises(UserError, match="has 10 images of 0, and 100 are needed"):
        finished_runs.calibrate(opened, np.random.default_rng(0))


def test_runs_are_measured_once_and_named_where_left_out(
    run: Any, look: Any, tmp_path: Path, capsys: Any
) -> None:
    said, _ = look(capsys)
    assert "1 runs measured, 0 were in the results, 4 left out" in said
    of_set = run.run_dir.parents[1]
    extra = [of_set / "method.name-acr" / "seed2", of_set / "method.name-other" / "seed1"]
    for path in extra:
        path.mkdir(parents=True)
    try:
        said, lines = look(capsys)
    finally:
        for path in extra:
            shutil.rmtree(path.parent)
    assert "0 runs measured, 1 were in the results, 6 left out" in said
    assert f"{extra[0]}: not finished" in said and f"{extra[1]}: no run of" in said
    assert f"{of_set.parent}/uniform_tiny: no such folder" in said
    assert len(lines) == 1
    curves = (tmp_path / "priors_curves.csv").read_text().splitlines()
    assert curves[1].startswith("reversed,simpro,2,12,5,") and len(curves[1].split()) == 3
    assert (tmp_path / "priors.png").stat().st_size > 10_000
    assert "reversed (FixMatch, SimPro*," in (tmp_path / "priors.md").read_text()


def test_a_run_that_was_trained_anew_is_measured_again(
    look: Any, tmp_path: Path, capsys: Any
) -> None:
    _, (line,) = look(capsys)
    path = tmp_path / "priors.csv"
    path.write_text(path.read_text().replace(line["trained_at"], "0123456789ab"))
    said, lines = look(capsys)
    assert "1 runs measured" in said and lines == [line]


def test_another_set_does_not_join_the_results(look: Any, tmp_path: Path, capsys: Any) -> None:
    look(capsys)
    path = tmp_path / "priors.csv"
    path.write_text(path.read_text().replace("digits_lt_tiny", "digits_lt_longer"))
    with pytest.raises(ConfigError, match="holds digits_lt_longer"):
        look(capsys)


def test_no_finished_run_is_an_error(look: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UserError, match="no finished run in a folder <distribution>_tiny"):
        look(capsys, "--runs", str(tmp_path))


def test_distances_of_shares_by_hand() -> None:
    kl, l1 = prior_estimates.distances([3, 1], [2.0, 2.0])
    assert kl == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert l1 == pytest.approx(0.5)
    kl, l1 = prior_estimates.distances([0, 5], np.array([1.0, 0.0]))
    assert kl == pytest.approx(-np.log(1e-6), abs=1e-5) and l1 == 2


def made_line(distribution: str, method: str, seed: int, value: float) -> dict[str, Any]:
    kinds = [f"{d}_{name}" for d in ("kl", "l1") for name in prior_estimates.ESTIMATES]
    return {
        **dict.fromkeys(prior_estimates.FIELDS, "x"),
        **dict.fromkeys(kinds, value),
        "distribution": distribution,
        "method": method,
        "seed": seed,
        "estimate": "own" if method in prior_estimates.OWN else "counted",
        "em_converged": seed != 2,
    }


def test_the_mean_weighs_distributions_alike_and_says_what_is_missing() -> None:
    lines = [
        made_line("consistent", "simpro", 1, 1.0),
        made_line("consistent", "simpro", 2, 3.0),
        made_line("reversed", "simpro", 1, 5.0),
        made_line("reversed", "fixmatch", 1, 7.0) | {"kl_40": ""},
    ]
    text = prior_estimates.table(lines)
    first = text[: text.index("## consistent")]
    assert "| SimPro | own | 3 | 3.500 |" in first
    assert "| FixMatch | counted | 1 (of 1 distributions) | 7.000 | 7.000 | 7.000 | - |" in first
    assert "uniform (all methods)" in text and "consistent (FixMatch, " in text
    assert "converged: consistent simpro 2." in text


def test_methods_with_an_estimate_of_their_own_are_known() -> None:
    assert set(prior_estimates.OWN) < set(METHODS)


RESULTS = prior_estimates.RESULTS / "prior_estimates.csv"


@pytest.mark.skipif(not RESULTS.is_file(), reason="bench/prior_estimates.py was not run here")
def test_the_table_is_that_of_the_lines() -> None:
    """As in the committed results, so that an edited table is noticed."""
    lines: list[dict[str, Any]] = list(csv.DictReader(RESULTS.read_text().splitlines()))
    assert prior_estimates.table(lines) == RESULTS.with_suffix(".md").read_text()
    assert {line["distribution"] for line in lines} == set(DISTRIBUTIONS)
