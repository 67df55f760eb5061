"""Reading runs, groups of seeds, and the terminal table."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpro_fast.answers.report import print_report
from simpro_fast.answers.report.groups import Group, group_runs, run_labels
from simpro_fast.answers.report.runs import Run, find_runs, kl_of_uniform, load_run
from simpro_fast.cli.report import main
from simpro_fast.run.files import read_metrics
from simpro_fast.utils.errors import UserError
from tests.answers.report.made_runs import make_run
from tests.answers.report.small_runs import groups_of, make_summary, write_run


def printed(*summaries: dict[str, Any]) -> str:
    return printed_groups(groups_of(*summaries))


def printed_groups(groups: list[Group]) -> str:
    out = io.StringIO()
    print_report(groups, file=out)
    return out.getvalue()


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


# Terminal


def test_accuracies_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = printed(make_summary())
    assert text.startswith("toy_lt/reversed: SimPro, seed 1, 1,200 steps in 51 s, 6,400 views/s\n")
    assert row_of(text, "overall").split()[-1] == "81.2"
    assert row_of(text, "many").split()[-1] == "88.0"
    assert row_of(text, "few").split()[-1] == "-"
    assert row_of(text, "name0").split() == ["name0", "150", "90.0"]
    assert "SimPro 0.062" in text
    assert f"(a uniform guess: {kl_of_uniform(make_summary()['pi_u_true']):.3f})" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\033" not in text


def bars(text: str) -> dict[str, str]:
    table, _, _ = text[text.index("unlabeled set") :].partition("\n  \u2588 pi_u")
    lines = table.splitlines()[1:]
    return {line.split()[0]: line.rpartition("% ")[2] for line in lines}


def test_bars_show_estimate_and_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summary = make_summary(pi_u=[0.4, 0.2, 0.3, 0.1], pi_u_true=[0.1, 0.2, 0.3, 0.4])
    drawn = bars(printed(summary))
    # The largest share is the full width of 40; the mark is the last cell of the true share.
    assert drawn["name0"] == "\u2588" * 9 + "\u2502" + "\u2588" * 30
    assert drawn["name1"] == "\u2588" * 19 + "\u2502"
    assert drawn["name3"] == "\u2588" * 10 + " " * 29 + "\u2502"
    text = printed(summary)
    assert row_of(text[text.index("unlabeled set") :], "name0").split()[:6] == [
        *("name0", "100", "10.0", "%", "40.0", "%")
    ]


def test_two_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    text = printed(make_summary(), make_summary(method="fixmatch", top1=60.0))
    assert row_of(text, "overall").split() == ["overall", "81.2", "60.0"]
    assert row_of(text, "name1").split() == ["name1", "149", "89.0", "89.0"]
    assert "SimPro 0.062, FixMatch 0.062" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_hundred_classes_are_grouped() -> None:
    per_class = [float(k) for k in range(100)]
    text = printed(make_summary(100, per_class=per_class))
    assert row_of(text, "0-4").split() == ["0-4", str(150 + 149 + 148 + 147 + 146), "2.0"]
    assert row_of(text, "95-99").split()[-1] == "97.0"
    assert len(text.splitlines()) < 64  # four of them say what was found


def test_unknown_truth_and_no_test_set() -> None:
    summary = make_summary(
        top1=None, top1_best=None, per_class=[None] * 4, pi_u_true=None, kl_pi_u=None,
        unlabeled_counts=None, many=None, medium=None,
    )  # fmt: skip
    text = printed(summary)
    assert row_of(text, "overall").split()[-1] == "-"
    assert row_of(text, "name2").split() == ["name2", "148", "-"]
    assert "truth" not in text
    assert "\u2502" not in text


class Terminal(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_escape_codes_and_glyphs_follow_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_report(groups_of(make_summary()), file=out)
    assert "\033[1m" in out.getvalue()
    assert "####" in out.getvalue()
    out.getvalue().encode("ascii")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    print_report(groups_of(make_summary()), file=plain)
    assert "\033" not in plain.getvalue()
    strip = re.compile(r"\033\[\d*m")
    assert strip.sub("", out.getvalue()) == plain.getvalue()


# Reading runs


def test_labels_tell_runs_apart() -> None:
    first = make_summary()

    def labels(*summaries: dict[str, Any]) -> list[str]:
        return run_labels([Run(Path(), summary, []) for summary in summaries])

    assert labels(first) == ["SimPro"]
    assert labels(first, make_summary(method="fixmatch")) == ["SimPro", "FixMatch"]
    assert labels(first, make_summary(name="other")) == ["toy_lt/reversed", "other"]
    assert labels(first, make_summary(name="toy_lt/uniform")) == ["reversed", "uniform"]
    assert labels(first, make_summary(seed=2))[1] == "toy_lt/reversed seed 2"
    assert len(set(labels(first, make_summary()))) == 2


def test_kl_of_uniform() -> None:
    assert kl_of_uniform([0.25] * 4) == pytest.approx(0.0)
    expected = 0.5 * np.log(1.5) + 0.5 * np.log(1.5)
    assert kl_of_uniform([0.5, 0.5, 0.0]) == pytest.approx(expected)


def test_metrics_of_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_metrics(path)


def test_series_leaves_out_null(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", make_summary()))
    steps, values = run.series("top1")
    assert steps.tolist() == [400, 800, 1200]
    assert values.tolist() == [51.0, 53.0, 55.0]
    assert run.series("nothing")[0].shape == (0,)


def test_what_is_no_run_is_told_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = tmp_path / "toy_lt" / "reversed" / "seed1"
    seed.mkdir(parents=True)
    (tmp_path / "file").touch()
    for arguments, code, told in (
        ([], 2, "no run directory; for example"),
        ([str(tmp_path / "nowhere")], 1, "nowhere: no such folder"),
        ([str(tmp_path / "file")], 1, "file: not a folder"),
        ([str(tmp_path)], 1, "neither a run (it has no summary.json and no config.yaml) nor"),
        ([str(tmp_path), "--forse"], 2, "did you mean --force?"),
    ):
        assert main(arguments) == code
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and shown.count("\n") == 1
        assert told in shown


def test_damaged_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run"):
        load_run(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        load_run(tmp_path)
    for text in ("{}", "[]", '{"steps": 3}'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(UserError, match=r"summary\.json is damaged .*missing"):
            load_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(make_summary(4, pi_u=[0.5, 0.5])))
    with pytest.raises(UserError, match=r"damaged \(pi_u must have a value for each of 4 classes"):
        load_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(make_summary(4)))
    with pytest.raises(UserError, match=r"metrics\.jsonl: No such file"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "top1": "many"}')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 1 is damaged \(top1: "):
        load_run(tmp_path)


def test_seeds_are_one_group_with_mean_and_deviation(tmp_path: Path) -> None:
    for seed, level in ((3, 0.0), (1, 2.0), (2, 4.0)):
        rows = {"top1": 50.0 + level, "mask_rate_per_class": [level / 4, None, 1.0, None]}
        values = {"seed": seed, "top1": 80.0 + level, "per_class": [level, None, 50.0, level]}
        write_run(tmp_path / f"a/seed{seed}", make_summary(**values), 3 + seed, **rows)
    (group,) = group_runs([load_run(path) for path in find_runs([tmp_path])])
    assert [run.summary["seed"] for run in group.runs] == [1, 2, 3]
    assert group.number("top1") == (82.0, 2.0)
    assert group.number("few") == (None, None)
    mean, spread = group.vector("per_class")
    np.testing.assert_allclose(mean, [2, np.nan, 50, 2])
    np.testing.assert_allclose(spread, [2, np.nan, 0, 2])
    # Seeds 1, 2 and 3 have 4, 5 and 6 rows: the last is that of one seed alone.
    steps, mean, spread = group.series("top1")
    assert steps.tolist() == [200, 400, 600, 800, 1000, 1200]
    np.testing.assert_allclose(mean, [52, 52, 52, 52, 52, 50])
    np.testing.assert_allclose(spread, [2, 2, 2, 2, 8**0.5, np.nan])
    assert group.series("mask_rate_per_class")[1].shape == (6, 4)
    text = printed(*(run.summary for run in group.runs))
    assert row_of(text, "overall").endswith("82.0 \u00b1 2.0")


def test_a_seed_twice_is_two_experiments(tmp_path: Path) -> None:
    for folder in ("runs", "other"):
        for seed in (1, 2):
            write_run(tmp_path / folder / f"x/seed{seed}", make_summary(seed=seed))
    groups = group_runs([load_run(path) for path in find_runs([tmp_path])])
    assert [[run.path.parts[-3] for run in g.runs] for g in groups] == [["other"] * 2, ["runs"] * 2]
    assert len({group.label for group in groups}) == 2


def test_many_experiments_have_a_line_each() -> None:
    summaries = [make_summary(name=f"toy_lt/tau_{k}", top1=80.0 - k) for k in range(10)]
    given = [summaries[k] for k in (3, 0, 9, 1, 2, 4, 5, 6, 7, 8)]
    text = printed(*given, make_summary(name="toy_lt/tau_0", seed=2, top1=70.0))
    assert row_of(text, "tau_0").split()[:6] == ["tau_0", "2", "seeds", "75.0", "\u00b1", "7.1"]
    assert row_of(text, "tau_9").split()[:4] == ["tau_9", "1", "run", "71.0"]
    # In the order given, whatever the means.
    assert re.findall(r"^tau_(\d) ", text, re.MULTILINE)[:10] == list("3091245678")


def test_other_splits_are_refused_by_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path / "a/seed1", name="a")
    fewer = make_run(tmp_path / "b/seed1", name="b", labeled_max=60)
    renamed = make_run(tmp_path / "c/seed1", name="c", class_names=list("abcdefghij"))
    same = make_run(tmp_path / "d/seed1", name="d")
    arguments = [str(first), str(fewer), "--json"]
    assert main(arguments) == 1
    told = capsys.readouterr().err
    for part in (str(fewer), "labeled images instead of", "--force"):
        assert part in told
    assert main([*arguments, "--force"]) == 0
    assert str(fewer) in json.loads(capsys.readouterr().out)["notes"][0]
    assert main([str(first), str(renamed), "--force"]) == 1
    assert "other classes" in capsys.readouterr().err
    make_run(tmp_path / "e/seed2", name="e", seed=2)
    assert main([str(first), str(same), str(tmp_path / "e"), "--json"]) == 0
    split = json.loads((same / "split.json").read_text())
    (same / "split.json").write_text(json.dumps({**split, "hash": "f" * 64}))
    capsys.readouterr()
    assert main([str(first), str(same), "--json"]) == 1
    assert "the same seed chose other images" in capsys.readouterr().err


def test_seeds_of_other_settings_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "x/seed1")
    make_run(tmp_path / "x/seed2", seed=2)
    tree = json.loads((tmp_path / "x/seed2/config.yaml").read_text())
    tree["method"]["tau"] = 2.0
    (tmp_path / "x/seed2/config.yaml").write_text(json.dumps(tree))
    assert main([str(tmp_path), "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "differ in more than the seed: method.tau (1.0, 2.0)" in note


def test_every_way_of_naming_runs_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the last --compare won."""
    paths = [str(make_run(tmp_path / name / "seed1", name=name)) for name in "abcd"]
    for arguments in (
        [paths[0], *(word for path in paths[1:] for word in ("--compare", path))],
        paths,
        [str(tmp_path)],
        [str(tmp_path), paths[2]],
    ):
        assert main([*arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [one["name"] for one in told["experiments"]] == list("abcd")
    summary = json.loads((Path(paths[1]) / "summary.json").read_text())
    shown = told["experiments"][1]
    assert shown["top1"] == {"mean": summary["top1"], "std": None, "standard_error": None}
    assert shown["pi_u"]["mean"] == summary["pi_u"]
    (run,) = shown["runs"]
    assert run == {
        **{"path": paths[1], "seed": 1, "split_seed": None},
        **{"state": "finished", "steps": 600},
    }


def test_unfinished_runs_are_shown_with_what_there_is(tmp_path: Path) -> None:
    path = make_run(tmp_path / "x/seed1", finished=False)
    run = load_run(path)
    last = run.metrics[-1]
    assert run.state == "not finished, step 600 of 1,200"
    assert run.summary["pi_u"] == last["pi_u"] and run.summary["top1"] == last["top1"]
    assert run.summary["steps"] == 600 and len(run.summary["class_names"]) == 10
    (path / "metrics.jsonl").unlink()
    empty = load_run(path)
    assert empty.summary["pi_u"] is None
    assert "not finished, step 0" in printed_groups(group_runs([empty]))


def test_what_no_schema_has_foreseen_is_a_line_that_names_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "x/seed1")

    def fail(*arguments: Any) -> None:
        raise TypeError("unsupported\noperand")

    for place in ("simpro_fast.cli.report.load_run", "simpro_fast.cli.report.print_report"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            assert main([str(path)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}: ") and "TypeError: unsupported" in line
