"""The training command as a user starts it: launchers, refusals, exit codes, what is written."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from simpro_fast.cli.key_hints import known_keys
from simpro_fast.cli.train import main, parse_arguments
from simpro_fast.config import Config, dump_config, foreign, load_config
from simpro_fast.utils.errors import ConfigError
from tests.conftest import TINY

Run = Callable[..., "CompletedProcess[str]"]
BIN = Path(sys.executable).parent
CONFIDENT = ["train.weak_forward=no_grad", "train.strong_forward=confident"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def metrics(folder: Path, name: str = "tiny") -> list[dict[str, Any]]:
    text = (folder / "runs" / name / "seed1" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_folder_of_a_shipped_name_is_not_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits_lt/reversed").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_arguments(["digits_lt/reversed", "seed=2"]).config == "digits_lt/reversed"


@pytest.mark.slow
def test_three_launchers_give_the_same_losses(
    train_command: Run, config_file: Path, tmp_path: Path
) -> None:
    """Every launcher starts it; the saved configuration trains again to the same losses."""
    launchers = {
        "python": [sys.executable],
        "torchrun": [str(BIN / "torchrun"), "--nproc-per-node=1", "--master-port=0"],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus=1", "--master_port=0"],
    }
    losses = {}
    for name, launcher in launchers.items():
        done = train_command(
            "--config",
            str(config_file),
            f"name={name}",
            "distributed.engine=deepspeed",
            "train.steps=3",
            "train.period=1",
            launcher=launcher,
        )
        assert done.returncode == 0, done.stderr
        losses[name] = [row["loss"] for row in metrics(tmp_path, name)]
    assert losses["python"] == losses["torchrun"] == losses["deepspeed"]
    saved = tmp_path / "runs/python/seed1/config.yaml"
    again = train_command("--config", str(saved), "name=again")
    assert again.returncode == 0, again.stderr
    assert [row["loss"] for row in metrics(tmp_path, "again")] == losses["python"]


def test_runs_of_one_process_do_not_meet(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed keeps groups of its own, and loggers their handlers, past the end of a run."""
    for seed in (1, 2):
        short = ("distributed.engine=deepspeed", "train.steps=1", "train.period=1")
        assert main([str(config_file), f"output_dir={tmp_path}", f"seed={seed}", *short]) == 0
        assert capsys.readouterr().out.count("the run is in ") == 1


def test_second_start_says_that_the_run_is_finished(train_command: Run, config_file: Path) -> None:
    first = train_command("--config", str(config_file))
    assert first.returncode == 0, first.stderr
    assert "starting fresh" in first.stdout
    second = train_command("--config", str(config_file))
    assert second.returncode == 0
    assert "is finished: 12 steps" in second.stdout
    other = train_command("--config", str(config_file), "optim.lr=0.5")
    assert other.returncode == 2
    assert "optim.lr: 0.05 -> 0.5" in other.stderr


def test_dry_run_writes_nothing(train_command: Run, config_file: Path, tmp_path: Path) -> None:
    done = train_command("--config", str(config_file), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "nothing was written" in done.stdout
    assert re.search(
        r"[\d.]+ s/step \(the first took .*\): 12 steps take about 00:\d\d", done.stdout
    )
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.yaml"}


def test_dry_run_refuses_what_the_start_would_refuse(
    train_command: Run, config_file: Path, tmp_path: Path
) -> None:
    """A folder that is a file, and a run of another configuration; what is there stays."""
    command = ["--config", str(config_file), "train.steps=1", "train.period=1"]
    (tmp_path / "taken").write_text("a file")
    refusals = {}
    for flags in ([], ["--dry-run"]):
        done = train_command(*command, *flags, "output_dir=taken/runs")
        assert done.returncode == 2 and "cannot be written (" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1 and "check output_dir" in done.stderr
    assert train_command(*command).returncode == 0
    run_dir = tmp_path / "runs/tiny/seed1"
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    for flags in ([], ["--dry-run"]):
        done = train_command(*command, *flags, "optim.lr=0.5", "train.steps=2")
        assert done.returncode == 2, done.stderr
        refusals[bool(flags)] = done.stderr.replace(run_dir.name, "")
    assert refusals[True] == refusals[False] and "optim.lr: " in refusals[True]
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_print_config_can_be_trained_from(
    train_command: Run, config_file: Path, tiny: Any, tmp_path: Path
) -> None:
    done = train_command("--config", str(config_file), "--print-config", "seed=5")
    assert done.returncode == 0
    assert done.stdout == dump_config(tiny({"seed": 5, "output_dir": "runs"}))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--cofnig", "x"], ["--cofnig", "--config"]),
        (["--config", "digits_lt/reversd"], ["digits_lt/reversed"]),
        (["--config", "CONFIG", "optim.lrr=1"], ["optim.lrr", "optim.lr"]),
        (["--config", "CONFIG", "distributed.expect_world_size=4"], ["=4", "1 rank"]),
        (["--config", "CONFIG", "device=cuda"], ["no CUDA device"]),
        (["--config", "CONFIG", "device=cpu", "method.impl=triton"], ["impl=triton", "eager"]),
        (["--config", "CONFIG", "data.name=cifra10"], ["cifra10", "cifar10"]),
        (["--config", "CONFIG", "model.name=wrn_28"], ["wrn_28", "wrn_28_2"]),
        (["--config", "CONFIG", "model.name=timm/resnet81"], ["timm/resnet81", "timm/resnet18"]),
        (["--config", "CONFIG", "method.name=daso", *CONFIDENT], ["train.strong_forward=all"]),
        ([], ["--config"]),
        (["photos", "seed=2"], ["photos is neither a YAML file nor a shipped configuration"]),
    ],
)
def test_usage_errors(
    train_command: Run, config_file: Path, arguments: list[str], parts: list[str]
) -> None:
    """One line, exit code 2; `--print-config` refuses with the same line, and prints nothing."""
    if "device=cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
    words = [str(config_file) if a == "CONFIG" else a for a in arguments]
    done = train_command(*words)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    shown = train_command(*words, "--print-config")
    assert (shown.returncode, shown.stderr, shown.stdout) == (2, done.stderr, "")
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--resume", "checkpoint.resume=auto|none|PATH"),
        ("--dry-rnu", "did you mean --dry-run?"),
        ("--frobnicate", "see --help"),
        ("--epochs=3", "train.steps=3 (the papers' epoch is one period of train.period steps)"),
        ("--name", "without dashes: name=..."),
        ("--lr=0.1", "optim.lr=0.1"),
        ("--batch-size", "data.batch_size=..."),
        ("--tau=2", "method.tau=2"),
        ("--gpus=4", "deepspeed --num_gpus N"),
        ("--num_gpus=4", "belongs before launch/train.py"),
    ],
)
def test_only_near_flags_are_suggested(flag: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        parse_arguments(["--config", "digits_lt/reversed", flag])


@pytest.mark.parametrize(("key", "words"), foreign.WORDS.items(), ids=[*foreign.WORDS])
def test_names_of_other_trainers_lead_to_the_key(key: str, words: tuple[str, ...]) -> None:
    """As a flag, as a key alone and as one of a section where there is none of that name."""
    dotted, _, implied = key.partition("=")
    assert dotted in known_keys()
    if implied:
        load_config("digits_lt/reversed", [key, "train.features=null"])
    for word in words:
        for flag in (f"--{word}", f"--{word.replace('-', '_')}=7"):
            with pytest.raises(ConfigError, match=re.escape(f"without dashes: {dotted}=")) as said:
                parse_arguments(["digits_lt/reversed", flag])
            assert "\n" not in str(said.value)
        name = word.replace("-", "_")
        for other in {name} - set(Config.model_fields) | {f"log.{name}"} - {"log.wandb"}:
            with pytest.raises(ConfigError, match=re.escape(f"did you mean '{key}'?")) as said:
                load_config("digits_lt/reversed", [f"{other}=7"])
            assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", ["gpus", "train.gpus", "num_gpus", "resume"])
def test_what_is_the_launchers_is_no_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"launcher's|see checkpoint\.resume="):
        load_config("digits_lt/reversed", [f"{name}=4"])


def test_a_name_of_another_trainer_stays_in_its_section() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'evaluate\.batch_size'"):
        load_config("digits_lt/reversed", ["evaluate.bs=7"])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["checkpoint.resume=/no/such"], ["/no/such"]),
        (["data.name=fashion_mnist", "data.root=/no/where"], ["/no/where"]),
        (["data.labeled_max=4000"], ["class", "4000"]),
    ],
)
def test_missing_things_are_one_line(
    train_command: Run, config_file: Path, tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    done = train_command("--config", str(config_file), *arguments)
    assert done.returncode in (1, 2)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert not (tmp_path / "runs" / "tiny" / "seed1" / "metrics.jsonl").exists()


def test_batch_that_does_not_divide_is_said_once(train_command: Run, config_file: Path) -> None:
    """Before the process group exists, by rank 0 alone."""
    for rank, said in (("0", True), ("1", False)):
        done = train_command(
            "--config",
            str(config_file),
            "data.batch_size=7",
            env={"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank},
        )
        assert done.returncode == 2
        assert ("7" in done.stderr and "2" in done.stderr and "6 or 8" in done.stderr) is said


def test_both_spellings_of_local_rank(train_command: Run, config_file: Path) -> None:
    for flag in ("--local_rank=0", "--local-rank=0"):
        done = train_command(flag, "--config", str(config_file), "--print-config")
        assert done.returncode == 0, done.stderr


def test_starts_without_a_compiler(train_command: Run, config_file: Path, tmp_path: Path) -> None:
    """Nothing is compiled, with an empty extension cache and no C++ compiler on PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "sh", "ldconfig", "uname"):
        found = shutil.which(name) or shutil.which(name, path="/sbin:/usr/sbin")
        if found:
            (tools / name).symlink_to(found)
    env = {"PATH": str(tools), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    command = ["--config", str(config_file)]
    done = train_command(*command, "distributed.engine=deepspeed", env=env)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "extensions").exists()
    for name, option in (("c", "train.compile=default"), ("k", "method.impl=compile")):
        compiled = train_command(*command, option, f"name={name}", env=env)
        assert compiled.returncode == 1
        assert f"{option} needs a C++ compiler" in compiled.stderr


def test_without_deepspeed_the_error_has_the_cure(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A module that cannot be imported stands for a missing package."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    command = ["--config", str(config_file), f"output_dir={tmp_path}"]
    assert main([*command, "distributed.engine=deepspeed"]) == 1
    said = capsys.readouterr().err
    assert "pip install deepspeed" in said and "distributed.engine=plain" in said
    assert main(command) == 0
