"""Runs on a user's own image files: resume, missing truth, missing test set, damaged files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from simpro_fast.answers.model import load_model
from simpro_fast.answers.unlabeled import unlabeled_set
from simpro_fast.cli import prepare
from simpro_fast.cli.entry import run as run_verb
from simpro_fast.cli.train import main as train_main
from simpro_fast.config import Config
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.image_list import MEAN, ImageListDataset
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.image_folders import cut, picture, save, tidy
from tests.data.tar_shards import as_shards
from tests.equality import by_part

MakeConfig = Callable[..., Config]
# The keys of conftest's TINY that describe the digits are not looked at.
PARTS = ("labeled", "unlabeled", "val")
OWN = {"data.name": "images", "data.image_size": 16, "data.batch_size": 4, "data.mu": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tidy(tmp_path / "data")


def folders(root: Path, **changes: Any) -> dict[str, Any]:
    paths = {f"data.{name}": str(root / name) for name in PARTS}
    return {**OWN, **paths, **changes}


def train(config: Config) -> dict[str, Any]:
    trainer = Trainer(config, start_ranks(config))
    try:
        return trainer.fit()
    finally:
        trainer.close()


def rows(config: Config) -> list[dict[str, Any]]:
    text = (config.run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(config: Config) -> dict[str, torch.Tensor]:
    return by_part(read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0]))["model"]


def test_run_without_a_truth(tiny: MakeConfig, root: Path) -> None:
    config = tiny(folders(root, **{"log.figures": True}))
    summary = train(config)
    assert summary["kl_pi_u"] is None and summary["pi_u_true"] is None
    assert summary["unlabeled_counts"] is None and summary["labeled_counts"] == [5, 4, 3]
    assert 0 <= summary["top1"] <= 100 and len(summary["per_class"]) == 3
    assert summary["images_replaced"] == 0
    for row in rows(config):
        assert row["kl_pi_u"] is None and row["pseudo_label_accuracy"] is None
        assert row["top1"] is not None and sum(row["pi_u"]) == pytest.approx(1)
    for name in ("views.npz", "mistakes.npz", "report.html"):
        assert (config.run_dir / "report" / name).is_file()


@pytest.mark.parametrize("kind", ["files", "packed", "shards"])
def test_interrupted_run_equals_the_unbroken_one(
    tiny: MakeConfig, root: Path, tmp_path: Path, kind: str
) -> None:
    """From files, from the packed array and from tar shards."""
    changes = folders(root)
    if kind == "shards":
        as_shards(root, root / "tars")
        changes |= {f"data.{name}": f"{root}/tars/{name}-*.tar" for name in PARTS}
    if kind == "packed":
        arguments = [f"--{name}={root}/{name}" for name in PARTS]
        assert prepare.main([*arguments, f"--output={root}/out", "--pack=16"]) == 0
        changes = {**OWN, "data.manifest": f"{root}/out/manifest.csv"}
        changes["data.packed"] = f"{root}/out/packed_16.npy"
    unbroken = tiny({**changes, "output_dir": str(tmp_path / "a")})
    train(unbroken)
    broken = tiny({**changes, "output_dir": str(tmp_path / "b")})
    first = Trainer(broken, start_ranks(broken))
    for _ in range(8):
        first.train_step()
        if first.step % 5 == 0:
            first._end_period()
            first._finish_period()
    first.save()
    first.close()
    train(broken)
    expected, found = weights(unbroken), weights(broken)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert rows(unbroken)[-1]["pi_u"] == rows(broken)[-1]["pi_u"]


def test_changed_file_list_is_noticed(tiny: MakeConfig, root: Path) -> None:
    train(tiny(folders(root, **{"train.steps": 8})))
    (root / "unlabeled/003.jpg").unlink()
    with pytest.raises(UserError, match="trained on another data"):
        train(tiny(folders(root)))


def test_replaced_pictures_of_the_same_names_are_noticed(
    tiny: MakeConfig, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has hashed them here; a folder that is moved as a whole stays known."""
    train(tiny(folders(root, **{"train.steps": 8})))
    moved = root.rename(tmp_path / "moved")
    train(tiny(folders(moved, **{"train.steps": 9})))
    save(moved / "unlabeled/003.jpg", picture(999, 39, 40), quality=90)
    with pytest.raises(UserError, match=r"image file has changed.*checkpoint\.resume=") as error:
        train(tiny(folders(moved)))
    named = str(error.value).rpartition("=")[2]
    assert train(tiny(folders(moved, **{"checkpoint.resume": named})))["steps"] == 12
    assert "it goes on with them" in caplog.text
    assert train(tiny(folders(moved, **{"train.steps": 13})))["steps"] == 13


def test_all_see_the_same_squares(
    tiny: MakeConfig, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is trained on, the test of a run, evaluate, load_model and predict."""
    for number in range(3):
        save(root / f"val/cats/film{number}.png", picture(number, 64, 36))
    config = tiny(folders(root, **{"data.fit": "pad", "data.interpolation": "bicubic"}))
    top1 = train(config)["top1"]
    dataset, model = load_dataset(config.data), load_model(config.run_dir)
    assert model.file.square == dataset.square == Square.of(16, "pad", "bicubic", MEAN)
    assert isinstance(dataset, ImageListDataset)
    films = [i for i, row in enumerate(dataset.manifest.rows) if "film" in row.path]
    assert len(films) == 3
    capsys.readouterr()
    for row in films:
        path, square = Path(dataset.manifest.rows[row].path), dataset.images[[row]][0]
        assert (square[:3] == model.file.square.fill).all(), "bars"
        assert np.array_equal(model.preprocess(path), square)
        assert np.array_equal(model.preprocess(Image.open(path)), square)
    for data in ([], [str(root / "val")]):
        output = f"--output={tmp_path}/answers{len(data)}"
        assert run_verb("evaluate", [str(config.run_dir), *data, "--json", output]) == 0
        found = json.loads(capsys.readouterr().out)["priors"]["none"]
        assert found["top1"]["value"] == pytest.approx(top1)


def test_other_squares_are_another_run(tiny: MakeConfig, root: Path) -> None:
    """Said by the keys, or by what model.weights expect where the keys leave it to them."""
    first = tiny({"name": "first", "data.interpolation": "bicubic"})
    train(first)
    changes = folders(root, **{"model.weights": str(first.run_dir / "model.safetensors")})
    short = tiny({**changes, "train.steps": 8})
    train(short)
    assert unlabeled_set(short.run_dir).dataset.square == Square(16, "crop", "bicubic")
    for key, value in (("data.fit", "pad"), ("data.interpolation", "bilinear")):
        with pytest.raises(ConfigError, match=rf"another configuration \({key}: "):
            train(tiny({**changes, key: value}))
    (first.run_dir / "model.json").unlink()
    with pytest.raises(UserError, match=r"other squares \(16 px, crop, bicubic.*now .*bilinear"):
        train(tiny(changes))


@pytest.mark.parametrize("held", [0, 1])
def test_without_val(
    tiny: MakeConfig, root: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    changes = folders(root, **{"data.holdout_per_class": held})
    del changes["data.val"]
    config = tiny(changes)
    summary = train(config)
    stored = json.loads((config.run_dir / "summary.json").read_text())
    assert stored == summary
    if held:
        assert summary["top1"] is not None and summary["labeled_counts"] == [4, 3, 2]
    else:
        for key in ("top1", "top1_class_mean", "top1_best", "top1_mean_last20", "per_class", "few"):
            assert summary[key] is None
        assert all(row["top1"] is None for row in rows(config))
    train(config)  # finished, and says so whatever was measured


def test_skipped_image_is_counted(tiny: MakeConfig, root: Path) -> None:
    """Damaged after the list was made; every image is used in 12 steps."""
    config = tiny(folders(root, **{"data.on_bad_image": "skip"}))
    trainer = Trainer(config, start_ranks(config))
    cut(root / "unlabeled/020.jpg", root / "unlabeled/020.jpg", 0.93)
    summary = trainer.fit()
    trainer.close()
    assert summary["steps"] == 12 and summary["images_replaced"] == 12 * 8 // 24


def test_damaged_files_are_found_skipped_and_trained_without(
    tiny: MakeConfig, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged image, from `prepare` to the end of training."""
    cut(root / "labeled/cats/trunc.jpg", root / "labeled/cats/0.jpg")
    (root / "labeled/dogs/empty.jpg").touch()
    (root / "labeled/owls/note.jpg").write_text("a note")
    arguments = [*(f"--{name}={root}/{name}" for name in PARTS), f"--output={root}/out"]
    assert prepare.main(arguments) == 1
    assert prepare.main([*arguments, "--on-bad-image=skip"]) == 0
    assert "3 skipped" in capsys.readouterr().out
    summary = train(tiny({**OWN, "data.manifest": f"{root}/out/manifest.csv"}))
    assert summary["steps"] == 12 and summary["labeled_counts"] == [5, 4, 3]
    assert summary["images_replaced"] == 0


@pytest.mark.parametrize("cure", ["repair", "skip"])
def test_run_goes_on_after_a_damaged_image(tiny: MakeConfig, root: Path, cure: str) -> None:
    """Damaged before the start, but not in its header; the message's two cures both work."""
    victim = root / "unlabeled/020.jpg"
    good = victim.read_bytes()
    cut(victim, victim, 0.93)
    config = tiny(folders(root, **{"checkpoint.every": 1}))
    with pytest.raises(UserError, match=f"{victim}: damaged"):
        train(config)
    if cure == "repair":
        victim.write_bytes(good)
        summary = train(config)
        assert summary["images_replaced"] == 0
    else:
        summary = train(tiny(folders(root, **{"checkpoint.every": 1, "data.on_bad_image": "skip"})))
        assert summary["images_replaced"] == 12 * 8 // 24
    assert summary["steps"] == 12


def test_class_without_labeled_images_trains_on_request(tiny: MakeConfig, root: Path) -> None:
    """20 finite steps."""
    shutil.rmtree(root / "labeled/owls")
    (root / "labeled/owls").mkdir()
    config = tiny(folders(root, **{"data.allow_empty_classes": True, "train.steps": 20}))
    summary = train(config)
    assert summary["labeled_counts"] == [5, 4, 0]
    assert all(p is not None for p in summary["pi_u"])
    assert rows(config)[-1]["step"] == 20
    assert all(row["loss"] is not None for row in rows(config)), "null where not finite"


def test_from_folders_to_a_trained_model_by_two_commands(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`prepare` writes a configuration that trains."""
    shutil.rmtree(root / "unlabeled")
    for i, name in enumerate(("1.jpg", "a b.JPG", "sub/deep.jpeg", "ü.png")):
        kind = "png" if name == "ü.png" else "jpeg"
        save(root / "unlabeled" / name, picture(100 + i), format=kind)
    (root / "unlabeled/readme.txt").write_text("hello")
    monkeypatch.chdir(tmp_path)
    arguments = ["--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]
    arguments += ["--output", "prepared", "--init-config", "own.yaml"]
    assert prepare.main(arguments) == 0
    assert "12 labeled, 4 unlabeled, 0 val images, 1 ignored" in capsys.readouterr().out
    short = ["train.steps=2", "train.period=1", "model.name=small_cnn", "data.image_size=16"]
    quiet = ["log.figures=false", "log.tensorboard=false", "distributed.engine=plain"]
    assert train_main(["--config", "own.yaml", "train.threads=1", *short, *quiet]) == 0
    said = capsys.readouterr().out
    assert "unlabeled M=4 per class unknown" in said and "accuracy is not measured" in said
    assert (tmp_path / "runs/own/seed1/model.safetensors").is_file()
    capsys.readouterr()
    assert train_main(["--config", "own.yaml", "train.threads=1", *short, *quiet]) == 0
    assert "is finished: 2 steps, nothing measured" in capsys.readouterr().out
