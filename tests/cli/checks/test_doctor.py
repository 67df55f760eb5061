"""The doctor: a table that can be read, verdicts with cures, exit codes for scripts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from simpro_fast.cli import doctor
from simpro_fast.cli.checks import computing, data, machine
from simpro_fast.cli.checks.table import Line, closing, merge, table
from simpro_fast.config import load_config
from simpro_fast.distributed.process_group import Ranks
from tests.conftest import ROOT
from tests.processes import clean_environment, finish, free_port, script, start

DOCTOR = str(ROOT / "launch" / "doctor.py")
CHECKS = ["machine", "versions", "ranks", "links", "folder", "disk"]
CHECKS += ["data", "kernels"]
PLAIN = "distributed.engine=plain"
CIFAR = ["data.name=cifar10", "data.image_size=null", "data.root=ROOT"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--output", str(tmp_path / "runs"), PLAIN]) == 0
    printed = capsys.readouterr().out
    assert "no problem" in printed.splitlines()[-1]
    rows = [row.split() for row in printed.splitlines()]
    assert [row[1] for row in rows if row[0] in ("ok", "skipped", "warning")] == CHECKS


def test_a_document_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--output", str(tmp_path / "runs"), "--json", PLAIN]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [line["check"] for line in checks] == CHECKS
    assert {line["verdict"] for line in checks} <= {"ok", "skipped", "warning"}
    found = {line["check"]: line["found"] for line in checks}
    assert "torch" in found["versions"] and "DeepSpeed" in found["versions"]
    assert "float64 reference" in found["kernels"]
    assert not list((tmp_path / "runs").iterdir()), "it cleans up after itself"


def test_one_failing_check_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Line:
        raise RuntimeError("the decoder\nhas a long story")

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(computing, "check_kernels", lambda ranks: broken())
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    file = tmp_path / "file"
    file.write_text("where the folder should be")
    options = ["--output", str(file), PLAIN, "distributed.expect_world_size=4"]
    assert doctor.main(options) == 1
    rows = capsys.readouterr().out.splitlines()
    problems = [row.split()[1] for row in rows if row.startswith("problem")]
    assert problems == ["ranks", "folder", "disk", "kernels"]
    assert "failed with RuntimeError: the decoder" in "\n".join(rows)
    assert "expect_world_size=4" in "\n".join(rows)
    assert sum(row.lstrip().startswith("-> ") for row in rows) == 3
    assert [row for row in rows if row.startswith("ok") and " data " in row]
    assert rows[-1].startswith("4 problem(s)")


@pytest.mark.parametrize(
    ("changes", "verdict", "told"),
    [
        ([], "ok", "131 labeled and 335 unlabeled images of 10 classes, 400 to test on"),
        (["data.labeled_max=170"], "problem", "labeled_max"),
        (CIFAR, "problem", "cifar-10-python.tar.gz is in ROOT"),
        (["data.name=stl10", "data.root=ROOT"], "problem", "set data.root to their folder"),
        (["data.name=imagenet_1k", "data.root=ROOT"], "ok", "is in ROOT; not read here"),
        (["data.name=images", "data.labeled=ROOT", "data.unlabeled=ROOT/u"], "problem", "ROOT/u"),
    ],
)
def test_the_data_set_of_the_configuration(
    tmp_path: Path, changes: list[str], verdict: str, told: str
) -> None:
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
    config = load_config(doctor.DEFAULT, [c.replace("ROOT", str(tmp_path)) for c in changes])
    alone = Ranks(0, 0, 1, 1, torch.device("cpu"))
    line = doctor.guarded(lambda: data.check_data(config, alone))
    assert line.verdict == verdict, line
    assert told.replace("ROOT", str(tmp_path)) in line.found and "\n" not in line.found


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--cofnig", "x"], "--cofnig"), (["--config", "digits_lt/reversd"], "digits_lt/reversed")],
)
def test_usage_errors(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(arguments) == 2
    printed = capsys.readouterr().err.strip()
    assert part in printed and "\n" not in printed


def test_two_ranks_whose_folder_is_not_shared(tmp_path: Path) -> None:
    """Rank 1 writes elsewhere, as where output_dir lies on a disk of each host."""
    port, ranks = free_port(), []
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        arguments = ["--output", str(tmp_path / f"disk{rank}"), PLAIN, "--config", doctor.DEFAULT]
        arguments += ["data.batch_size=8", "data.mu=2"]
        arguments += ["--json"]
        environment, output = {**clean_environment(), **env}, tmp_path / f"rank{rank}"
        process = start(script, DOCTOR, arguments, environment=environment, output=output)
        ranks.append((process, output))
    done = [finish(*rank) for rank in ranks]
    assert [rank.returncode for rank in done] == [1, 1], done
    checks = json.loads(done[0].stdout)["checks"]
    assert [line["check"] for line in checks if line["verdict"] == "problem"] == ["folder"]
    found = {line["check"]: line["found"] for line in checks}
    assert f"2 on {os.uname().nodename} x2" in found["ranks"]
    assert "gloo" in found["links"] and "GB/s" in found["links"]
    assert "is not shared" in found["folder"]
    assert done[1].stdout == "", "rank 0 speaks for all"


def test_merging_the_lines_of_many_ranks() -> None:
    good, slow = Line("ok", "fine"), Line("warning", "slow", "hurry")
    hosts = ["a", "b", "c"]
    assert merge([line.to_bytes() for line in (good, good, good)], hosts) == good
    one = merge([line.to_bytes() for line in (good, slow, good)], hosts)
    assert one == Line("warning", "rank 1 on b: slow", "hurry")
    two = merge([line.to_bytes() for line in (good, slow, slow)], hosts)
    assert two.found == "rank 1 on b, 1 more rank(s): slow"
    assert merge([slow.to_bytes()] * 3, hosts) == slow
    shown = table([Line("problem", "full", "delete", "disk"), good])
    assert shown.splitlines()[1].strip() == "-> delete"
    assert closing([good]).startswith("no problem: training can start")


def test_known_bad_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver under new CUDA, and both DALI builds."""
    versions = {"nvidia-dali-cuda120": "2.0", "nvidia-dali-cuda130": "2.4.0"}
    monkeypatch.setattr(machine, "version_of", lambda name: versions.get(name))
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    found = [what for what, _ in machine._bad_pairs("550.54.15")]
    assert len(found) == 2
    assert "driver 580" in found[1]
    versions.clear()
    assert machine._bad_pairs("580.65.06") == []
