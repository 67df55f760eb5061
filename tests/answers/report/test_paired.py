"""Experiments over several splits: what is one experiment, what spreads, and who is ahead."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from simpro_fast.answers.report import print_report
from simpro_fast.answers.report.groups import Group, group_runs
from simpro_fast.answers.report.paired import Difference, compare, left_out, not_adjusted
from simpro_fast.answers.report.runs import Run
from simpro_fast.cli.report import main
from simpro_fast.cli.sweep import members_of
from simpro_fast.config import flatten
from tests.answers.report.made_runs import make_run
from tests.answers.report.small_runs import make_summary


def run_of(method: str, split: int, top1: float | None, seed: int = 1, **values: Any) -> Run:
    """A run on split number `split`; `state` says that it is not finished."""
    state = values.pop("state", "")
    name = f"toy_lt/data.split_seed-{split}/method.name-{method}"
    values = {"top1": top1, "top1_class_mean": top1, "seed": seed, "name": name} | values
    return Run(
        Path(name, f"seed{seed}"),
        make_summary(method=method, **values),
        [],
        state,
        config={"data": {"split_seed": split}},
        split={"hash": f"{split:064x}"},
    )


def two(first: dict[int, float], second: dict[int, float]) -> list[Group]:
    """FixMatch and SimPro by their accuracies on each split."""
    return group_runs(
        [
            *(run_of("fixmatch", split, value) for split, value in first.items()),
            *(run_of("simpro", split, value) for split, value in second.items()),
        ]
    )


def by_key(groups: list[Group]) -> dict[str, Difference]:
    return {one.key: one for one in compare(groups)}


def printed(groups: list[Group]) -> str:
    out = io.StringIO()
    print_report(groups, file=out)
    return " ".join(out.getvalue().split())


def test_a_difference_is_paired_by_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The splits spread by 13 points, the differences 1, 2, 3 and 4 by 1.3."""
    groups = two({1: 80, 2: 70, 3: 90, 4: 60}, {4: 64, 3: 93, 2: 72, 1: 81})
    found = by_key(groups)["top1"]
    assert (found.label, found.other) == ("SimPro", "FixMatch")
    assert found.mean == 2.5 and len(found.values) == 4
    # sqrt(5 / 3 / 4); t of three degrees of freedom is 3.182, and 3.182 * 0.6455 = 2.05.
    assert found.error == pytest.approx(0.645497)
    assert found.verdict == "ahead"
    assert [group.number("top1")[0] for group in groups] == [75.0, 77.5]
    text = printed(groups)
    assert "SimPro is ahead of FixMatch by 2.5 points (standard error 0.6, 4 splits)." in text
    assert "75.0 \u00b1 6.5" in text and "\u00b1 standard error over splits" in text
    behind = by_key(groups[::-1])["top1"]
    assert behind.mean == -2.5 and behind.verdict == "behind"


def test_standard_error_and_verdict_agree_with_scipy() -> None:
    rng = np.random.default_rng(0)
    verdicts = set()
    for _ in range(100):
        splits = int(rng.integers(2, 12))
        a, b = rng.normal(70, 3, splits), rng.normal(72, 3, splits)
        found = by_key(two(dict(enumerate(a)), dict(enumerate(b))))["top1"]
        expected = stats.ttest_rel(b, a)
        assert found.error is not None
        assert found.mean / found.error == pytest.approx(expected.statistic)
        assert found.clear == (expected.pvalue < 0.05)
        verdicts.add(found.clear)
    assert verdicts == {True, False}


def test_what_is_not_clear_is_not_distinguishable() -> None:
    # 1, -1 and 3: mean 1, standard error sqrt(4 / 3).
    groups = two({1: 80, 2: 70, 3: 60}, {1: 81, 2: 69, 3: 63})
    found = by_key(groups)["top1"]
    assert found.error == pytest.approx((4 / 3) ** 0.5) and found.verdict == "not distinguishable"
    assert (
        "SimPro and FixMatch are not distinguishable, +1.0 points (standard error 1.2, 3 splits)."
        in printed(groups)
    )


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_equal_differences_have_shown_no_spread(shift: float) -> None:
    """0.1 more than 0.2 and 0.7 rounds differently."""
    found = by_key(two({1: 0.2, 2: 0.7}, {1: 0.2 + shift, 2: 0.7 + shift}))["top1"]
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.verdict == "not distinguishable"


def test_one_split_says_nothing_about_others() -> None:
    runs = [run_of(m, 1, 70.0 + s, s) for m in ("fixmatch", "simpro") for s in (1, 2, 3)]
    groups = group_runs(runs)
    found = by_key(groups)["top1"]
    assert found.error is None and len(found.values) == 1 and not found.clear
    text = printed(groups)
    assert "+0.0 points on one split, which says nothing about other labels" in text
    # The deviation over seeds is that of 71, 72 and 73.
    assert groups[0].number("top1") == (72.0, 1.0)
    assert "\u00b1 standard deviation over seeds of one split" in text


def test_seeds_of_a_split_count_once() -> None:
    """Three seeds on one split do not outweigh one seed on another."""
    runs = [run_of("fixmatch", 1, 70.0, seed) for seed in (1, 2, 3)] + [run_of("fixmatch", 2, 50.0)]
    runs += [run_of("simpro", 1, 72.0, 1), run_of("simpro", 1, 76.0, 2), run_of("simpro", 2, 52.0)]
    fixmatch, simpro = groups = group_runs(runs)
    assert fixmatch.repetitions == simpro.repetitions == "2 splits"
    assert fixmatch.number("top1") == (60.0, 10.0)
    assert simpro.number("top1") == (63.0, pytest.approx(11.0))
    assert by_key(groups)["top1"].values == (4.0, 2.0)


def test_spread_of_lists_is_over_splits_that_have_a_value() -> None:
    lists = {1: [1.0, None, 5.0, None], 2: [3.0, 2.0, 5.0, None], 3: [5.0, 4.0, 5.0, None]}
    (group,) = group_runs([run_of("simpro", s, 70.0, per_class=v) for s, v in lists.items()])
    mean, error = group.vector("per_class")
    np.testing.assert_allclose(mean, [3, 3, 5, np.nan])
    np.testing.assert_allclose(error, [2 / 3**0.5, 1, 0, np.nan])


def test_a_split_of_one_side_is_left_out_and_said() -> None:
    runs = [run_of("fixmatch", split, value) for split, value in ((1, 70.0), (2, 60.0), (3, 10.0))]
    runs += [run_of("simpro", 1, 71.0), run_of("simpro", 2, 63.0), run_of("simpro", 4, 90.0)]
    runs.append(run_of("simpro", 3, 99.0, state="not finished, step 60 of 120"))
    groups = group_runs(runs)
    assert by_key(groups)["top1"].values == (1.0, 3.0)
    theirs, ours = left_out(groups)
    assert theirs.startswith("split seed 3: finished in FixMatch and not in SimPro")
    assert ours.startswith("split seed 4: finished in SimPro and not in FixMatch")
    assert left_out(two({1: 70}, {1: 71})) == []
    apart = two({1: 70}, {2: 71})
    assert compare(apart) == [] and "is finished in both" in left_out(apart)[0]


def test_lower_kl_is_ahead_and_equal_class_means_are_left_out() -> None:
    runs = [run_of("fixmatch", s, 70.0 + s, kl_pi_u=1.0 + s / 100) for s in (1, 2, 3)]
    runs += [run_of("simpro", s, 70.0, kl_pi_u=0.1) for s in (1, 2, 3)]
    assert {key: one.verdict for key, one in by_key(group_runs(runs)).items()} == {
        "top1": "not distinguishable",  # t is 3.46, and 4.30 for two degrees of freedom
        "kl_pi_u": "ahead",
    }
    runs[0].summary["top1_class_mean"] = 20.0
    assert "top1_class_mean" in by_key(group_runs(runs))
    runs[0].summary["top1"] = None
    found = by_key(group_runs(runs))
    assert len(found["top1"].values) == 2 and len(found["top1_class_mean"].values) == 3


# Folders


def set_accuracy(path: Path, top1: float) -> None:
    summary = json.loads((path / "summary.json").read_text())
    new = {"top1": top1, "top1_class_mean": top1}
    (path / "summary.json").write_text(json.dumps(summary | new))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The runs of `train digits_lt/reversed --grid data.split_seed=... --grid method.name=...`."""
    grids = ["data.split_seed=null,1,2", "method.name=simpro,fixmatch"]
    members = members_of("digits_lt/reversed", grids, None, [f"output_dir={tmp_path}"])
    assert len(members) == 6
    for member in members:
        split, method = (flatten(member.config)[key] for key in ("data.split_seed", "method.name"))
        path = make_run(member.run_dir, name=member.config.name, method=method, split_seed=split)
        set_accuracy(path, 70 + 5 * (split or 0) + (method == "simpro") * (3 + (split or 0)))
    return tmp_path


def test_a_sweep_over_splits_is_one_experiment_per_method(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["notes"] == []
    assert [one["label"] for one in told["experiments"]] == ["FixMatch", "SimPro"]
    for one in told["experiments"]:
        assert one["name"] == f"digits_lt/reversed/method.name-{one['method']}"
        assert [run["split_seed"] for run in one["runs"]] == [None, 1, 2]
    fixmatch, simpro = (one["top1"] for one in told["experiments"])
    assert fixmatch == {"mean": 75, "std": None, "standard_error": pytest.approx(5 / 3**0.5)}
    assert simpro["mean"] == 79
    first = told["differences"][0]
    assert first == {
        **{"experiment": "SimPro", "minus": "FixMatch", "number": "top1", "splits": 3, "mean": 4},
        **{"standard_error": pytest.approx(1 / 3**0.5), "verdict": "ahead"},
    }
    # A run named first makes its experiment the one that others are compared with.
    (run,) = sweep.glob("*/*/data.split_seed-1/method.name-simpro/seed1")
    assert main([str(run), str(sweep), "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["differences"]
    assert (first["minus"], first["mean"], first["verdict"]) == ("SimPro", -4, "behind")


def test_two_sweeps_of_the_same_runs_are_two_experiments_each(sweep: Path) -> None:
    """A folder for each split does not tear an experiment apart."""
    runs = [run_of("simpro", split, 70.0) for split in (1, 2)]
    again = [Run(Path("other") / run.path, *list(vars(run).values())[1:]) for run in runs]
    assert [group.repetitions for group in group_runs([*runs, *again])] == ["2 splits"] * 2


@pytest.mark.parametrize(
    ("form", "head"),
    [
        ("markdown", "| experiment | method | runs (\u00b1 standard error over splits) | "),
        ("latex", r"experiment & method & runs ($\pm$ standard error over splits) & "),
    ],
)
def test_tables_say_what_spreads(
    sweep: Path, capsys: pytest.CaptureFixture[str], form: str, head: str
) -> None:
    assert main([str(sweep), "--format", form]) == 0
    text = capsys.readouterr().out
    assert head in text and "3 splits" in text and "2.9" in text
    assert main([str(sweep), "--format", "csv"]) == 0
    row = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert float(row["top1_standard_error"]) == pytest.approx(5 / 3**0.5)
    assert row["top1_std"] == ""


@pytest.mark.parametrize(
    ("why", "how", "data"),
    [
        ("205 labeled images instead of 387", {"split_seed": 1, "labeled_max": 80}, "d"),
        ("share no split with", {"split_seed": 8}, "d"),
        ("share no split with", {"split_seed": 8, "labeled_max": 80}, "d"),
        ("other images or labels", {"split_seed": 1}, "e"),
    ],
)
def test_really_different_data_are_refused(
    sweep: Path, capsys: pytest.CaptureFixture[str], why: str, how: dict[str, Any], data: str
) -> None:
    path = make_run(sweep / "other", name="other", method="acr", **how)
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps(environment | {"data": data * 64}))
    assert main([str(sweep), "--json"]) == 1
    told = capsys.readouterr().err
    assert why in told and str(path) in told and "--force" in told
    # Beside each other all the same, but no difference of the same rows of other images.
    assert main([str(sweep), "--json", "--force"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["experiments"]) == 3 and shown["notes"]
    assert "ACR" not in {one["experiment"] for one in shown["differences"]}


def test_split_seeds_may_hold_out_other_numbers_of_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of own images a copy of a held-out one is not labeled, so a split may have fewer of them."""
    for method in ("simpro", "fixmatch"):
        for split, most in ((1, 150), (2, 149)):
            path = tmp_path / f"x/data.split_seed-{split}/{method}/seed1"
            name = f"x/data.split_seed-{split}/{method}"
            make_run(path, name=name, method=method, split_seed=split, labeled_max=most)
    assert main([str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["differences"][0]["splits"] == 2


def test_several_verdicts_are_said_to_be_unadjusted() -> None:
    def difference(label: str, *values: float) -> Difference:
        return Difference(label, "a", "top1", values)

    assert "about one is called" in not_adjusted([difference("b", 1, 2), difference("c", 1, 2)])
    assert not_adjusted([difference("b", 1, 2), difference("c", 1)]) == ""
    assert not_adjusted([difference("b", 1), difference("c", 1)]) == ""
