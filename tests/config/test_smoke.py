"""`--smoke`: sizes only, shown by --print-config, anew each time and away from real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from simpro_fast.cli.train import main
from simpro_fast.config import flatten, load_config, load_smoke_config
from simpro_fast.config.smoke import smoke_sizes
from tests.config.test_shipped_configs import CONFIGS, NAMES
from tests.conftest import TINY
from tests.data.image_folders import tidy

Run = Callable[..., "CompletedProcess[str]"]
# What a smoke run may change: numbers of steps, images, pixels, threads, and what is drawn.
SIZE_KEYS = {
    *("train.steps", "train.period", "train.threads", "evaluate.every", "evaluate.batch_size"),
    *("data.batch_size", "data.mu", "data.labeled_max", "data.unlabeled_max", "data.image_size"),
    *("data.gamma_labeled", "data.total_max", "data.test_per_class", "evaluate.heap_images"),
    *("log.figures", "log.tensorboard", "log.wandb", "log.mlflow", "name"),
}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_experiments_change_in_size_alone(name: str) -> None:
    config, changes = load_smoke_config(name, [], 1)
    small, real = flatten(config), flatten(load_config(name))
    differing = {key for key in small if small[key] != real[key]}
    assert differing <= SIZE_KEYS
    assert differing <= {item.partition("=")[0] for item in changes}, "nothing changes unsaid"
    assert small["name"] == f"smoke/{name}"
    assert small["train.steps"] == 3 and small["data.batch_size"] == 2
    assert (
        small["data.image_size"] in (None, 64)
        or small["data.image_size"] == real["data.image_size"]
    )


def test_command_line_wins_but_for_the_place() -> None:
    overrides = ["train.steps=5", "data.mu=4", "name=mine", "data.batch_size=6"]
    config, changes = load_smoke_config("cifar10_lt/uniform", overrides, 2)
    assert (config.train.steps, config.data.mu, config.data.batch_size) == (5, 4, 6)
    assert config.name == "smoke/mine"
    assert not any(item.startswith(("train.steps", "data.mu", "data.batch")) for item in changes)


def test_sizes_fit_what_the_experiment_has() -> None:
    """Ranks share the batch, warm-up is shorter than the run, sets keep the pixels they have."""
    tree = {
        "data": {"name": "images", "image_size": 224, "gamma_unlabeled": 9.0},
        "optim": {"warmup_steps": 500},
        "distributed": {"micro_batch": 8},
    }
    sizes = smoke_sizes(tree, 4)
    for item in ("data.batch_size=8", "optim.warmup_steps=1", "data.gamma_unlabeled=2"):
        assert item in sizes
    assert "data.image_size=64" in sizes and "distributed.micro_batch=1" in sizes
    for model in ("torchvision/vit_b_16", "resnet50"):
        pixels = smoke_sizes({**tree, "model": {"name": model}}, 1)
        assert ("data.image_size=64" in pixels) == (model == "resnet50")
    small = smoke_sizes({"data": {"name": "images", "image_size": 32}}, 1)
    assert not any(item.startswith(("data.image_size", "optim.", "distributed.")) for item in small)


def test_print_config_shows_the_changes_and_can_be_trained_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--smoke", "--config", "stl10_lt/gamma20", "--print-config", "seed=3"]) == 0
    said = capsys.readouterr().out
    assert "# --smoke: train.steps=3\n" in said and "# --smoke: name=smoke/stl10_lt/gamma20" in said
    (tmp_path / "printed.yaml").write_text(said)
    expected, changes = load_smoke_config("stl10_lt/gamma20", ["seed=3"], 1)
    assert load_config(tmp_path / "printed.yaml") == expected
    assert said.count("# --smoke:") == len(changes) == len({c.partition("=")[0] for c in changes})


def test_a_real_run_cannot_lie_where_smoke_runs_are_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"output_dir={tmp_path}"
    assert main(["--config", "digits_lt/reversed", place, "name=smoke/precious"]) == 2
    assert "emptied by --smoke; choose another name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_change_is_documented() -> None:
    section = (
        (CONFIGS / "README.md").read_text().partition("## Smoke runs")[2].partition("\n## ")[0]
    )
    for key in SIZE_KEYS | {
        "optim.warmup_steps",
        "data.holdout_per_class",
        "distributed.micro_batch",
    }:
        assert f"`{key}`" in section or f"`{key}=" in section, key


def test_starts_anew_and_leaves_the_real_run_alone(train_command: Run, tmp_path: Path) -> None:
    """With DeepSpeed, as a user starts it; a finished smoke run is no reason to do nothing."""
    tree = {**TINY, "distributed": {"engine": "deepspeed"}, "name": "experiment"}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(tree))
    real = tmp_path / "runs/experiment/seed1/checkpoints"
    real.mkdir(parents=True)
    (real / "step_000000009.pt").write_text("a real run")
    for attempt in range(2):
        faster = ["distributed.engine=plain"] if attempt else []
        done = train_command("--smoke", "--config", "e.yaml", *faster)
        assert done.returncode == 0, done.stderr
        assert "starting fresh" in done.stdout
        assert ("emptied for this smoke run" in done.stdout) == (attempt == 1)
    folder = tmp_path / "runs/smoke/experiment/seed1"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3]
    assert (folder / "model.safetensors").is_file()
    assert (real / "step_000000009.pt").read_text() == "a real run"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"experiment", "smoke"}


def test_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tidy(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    folders = [f"data.{part}={root}/{part}" for part in ("labeled", "unlabeled", "val")]
    (tmp_path / "own.yaml").write_text("name: own\ndata: {name: images, image_size: 224}")
    options = ["model.name=small_cnn", "distributed.engine=plain", *folders]
    assert main(["--smoke", "--config", "own.yaml", *options]) == 0
    model = json.loads((tmp_path / "runs/smoke/own/seed1/model.json").read_text())
    assert model["image_size"] == 64


def test_runs_of_one_process_do_not_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed keeps groups of its own, and loggers their handlers, past the end of a run."""
    for seed in (1, 2):
        arguments = ["digits_lt/reversed", f"output_dir={tmp_path}", f"seed={seed}"]
        assert main(["--smoke", "--config", *arguments]) == 0
        assert capsys.readouterr().out.count("summary.json") == 1
