"""`evaluate` and `shares` on a tiny network, from folders, manifests and the run's own test set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from simpro_fast import load_model
from simpro_fast.answers.estimation import bayesian
from simpro_fast.cli import evaluate, shares
from simpro_fast.cli.entry import main
from simpro_fast.config.schema import Config
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.split import load_split
from simpro_fast.utils.atomic_write import write_json
from tests.answers.trained import train

Outcome = tuple[int, dict[str, Any], str]
Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains of an untrained network would need seconds to agree."""
    monkeypatch.setattr(bayesian, "_FIRST_DRAWS", 100)
    monkeypatch.setattr(bayesian, "_MOST_DRAWS", 100)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def folders(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`val/<class>/` and `unlabeled/` with the test and the unlabeled images of the run."""
    root, dataset, split = (
        tmp_path_factory.mktemp("folders"),
        load_dataset(config.data),
        load_split(config.run_dir),
    )
    images, labels = dataset.test_part
    for row in split.test:
        save(root / "val" / dataset.class_names[labels[row]] / f"{row}.png", images[row])
    for row in split.unlabeled:
        save(root / "unlabeled" / f"{row}.png", dataset.unlabeled_pool[row])
    return root


@pytest.fixture(scope="module")
def bare(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without counts of a test set, so that shares need not draw."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "model.safetensors").symlink_to(config.run_dir / "model.safetensors")
    described = json.loads((config.run_dir / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**described, "confusion": None}))
    return folder


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs a verb with --json; returns exit code, document and stderr."""

    def run(*words: object) -> Outcome:
        flags = ("--json", "--output", tmp_path / "out", "--threads", "1", "--overwrite")
        code = main([*map(str, words), *map(str, flags)])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


def test_evaluate_the_runs_own_test(config: Config, command: Command, tmp_path: Path) -> None:
    code, said, _ = command("evaluate", config.run_dir, "--prior", "uniform")
    assert code == 0 and list(said["priors"]) == ["none", "uniform"]
    none = said["priors"]["none"]
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert none["top1"]["value"] == pytest.approx(summary["top1"])
    for key in ("confusion", "many", "few", "top_k"):
        assert none[key] == summary[key]
    for key in ("ece", "temperature", "log_likelihood"):
        assert none[key] == pytest.approx(summary[key], rel=1e-5)
    assert none["top_k_accuracy"]["value"] == pytest.approx(summary["top_k_accuracy"])
    assert none["top1"]["low"] < none["top1"]["value"] < none["top1"]["high"]
    # tau = 1 here, so the uniform prior is the plain softmax
    assert said["priors"]["uniform"]["log_likelihood"] == pytest.approx(none["log_likelihood"])
    assert json.loads((tmp_path / "out/evaluation.json").read_text()) == said
    for name in ("confusion.png", "reliability.png"):
        assert Image.open(tmp_path / "out" / name).size[0] > 300


def test_evaluate_a_folder_as_scikit_learn_does(
    config: Config, folders: Path, command: Command
) -> None:
    code, said, _ = command("evaluate", config.run_dir, folders / "val", "--no-figures")
    model, none = load_model(config.run_dir), said["priors"]["none"]
    files = sorted((folders / "val").rglob("*.png"))
    truth = [file.parent.name for file in files]
    predicted = [found.label for found in model.predict(files)]
    names = list(model.class_names)
    assert code == 0 and said["images"] == len(files)
    assert none["confusion"] == confusion_matrix(truth, predicted, labels=names).tolist()
    assert none["class_mean"]["value"] / 100 == pytest.approx(
        balanced_accuracy_score(truth, predicted)
    )


def test_evaluate_manifests_and_classes_without_images(
    config: Config, folders: Path, command: Command, tmp_path: Path
) -> None:
    rows = [f"{folders / 'val' / k / name},{k},test" for k, name in listed(folders, "0123")]
    rows.append(f"{folders / 'unlabeled' / 'nowhere.png'},4,unlabeled")
    manifest = tmp_path / "some.csv"
    manifest.write_text("path,label,split\n" + "\n".join(rows) + "\n")
    prior = tmp_path / "prior.json"
    write_json(prior, {str(k): float(k < 4) for k in range(10)})
    code, said, _ = command("evaluate", config.run_dir, manifest, "--prior", prior)
    assert code == 0 and said["images"] == len(rows) - 1
    absent = said["priors"]["none"]["per_class"][7]
    assert absent == {
        **{"class": "7", "images": 0, "correct": 0},
        **dict.fromkeys(("accuracy", "low", "high")),
    }
    matrix = np.array(said["priors"][str(prior)]["confusion"])
    assert matrix[:, 4:].sum() == 0, "a prior of 0 rules a class out"


def listed(folders: Path, classes: str) -> list[tuple[str, str]]:
    return [(k, f.name) for k in classes for f in sorted((folders / "val" / k).iterdir())]


def test_evaluate_names_what_is_wrong(
    config: Config, folders: Path, command: Command, tmp_path: Path
) -> None:
    renamed = tmp_path / "val"
    for k, name in listed(folders, "01"):
        save(renamed / k / name, np.array(Image.open(folders / "val" / k / name)))
    (renamed / "0" / "broken.png").write_bytes(b"\x89PNG")
    code, said, err = command("evaluate", config.run_dir, renamed)
    assert code == 1 and "broken.png" in err and sum(said["bad_images"].values()) == 1
    assert command("evaluate", config.run_dir, renamed, "--on-bad-image", "skip")[0] == 0
    (renamed / "1").rename(renamed / "seven")
    code, _, err = command("evaluate", config.run_dir, renamed)
    assert code == 2 and "'seven'" in err and "nearest" in err
    assert command("evaluate", config.run_dir, renamed, "--run-test")[0] == 2
    code, _, err = command("evaluate", config.run_dir, folders / "unlabeled")
    assert code == 1 and "one subfolder per class" in err
    code, _, err = command("evaluate", config.run_dir / "model.safetensors", tmp_path / "nowhere")
    assert code == 1 and "nowhere" in err


def test_shares_with_the_counts_of_the_model(
    config: Config, folders: Path, command: Command, tmp_path: Path
) -> None:
    code, said, err = command("shares", config.run_dir, folders / "unlabeled")
    assert code == 0 and said["method"] == "bayesian" and "trained on" in err
    assert said["images"] == len(list((folders / "unlabeled").iterdir()))
    rows = said["rows"]
    assert [row["class"] for row in rows] == list(load_model(config.run_dir).class_names)
    for key in ("estimate", "predicted", "black_box", "em", "mean_posterior", "pi_u"):
        assert sum(row[key] for row in rows) == pytest.approx(1), key
    assert all(row["low"] <= row["estimate"] <= row["high"] for row in rows)
    assert said["calibration"] == {"from": "model", "images": 100}
    assert json.loads((tmp_path / "out/shares.json").read_text()) == said
    assert Image.open(tmp_path / "out/shares.png").size[0] > 300
    calibrated = ("--calibrate", folders / "val", "--no-figures")
    given = command("shares", config.run_dir, folders / "unlabeled", *calibrated)[1]
    assert sum(row.pop("em_calibrated") for row in given["rows"]) == pytest.approx(1)
    assert {row.pop("em_calibrated") for row in rows} == {None}, "these logits are not at hand"
    assert given["rows"] == rows, "a function of images, counts and seed"
    assert given["calibration"] == {"from": str(folders / "val"), "images": 100}


def test_shares_without_validation_images_says_so(
    bare: Path, folders: Path, command: Command
) -> None:
    code, said, err = command("shares", bare, folders / "unlabeled")
    assert code == 0 and "there is no interval" in err and said["calibration"] is None
    assert all(row["low"] is row["high"] is None for row in said["rows"])
    assert {row["method"] for row in said["rows"]} == {"mean_posterior"}


def test_shares_of_a_sample_and_with_bad_files(
    config: Config, folders: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    code, said, err = command("shares", config.run_dir, folders / "unlabeled", tmp_path / "bad.png")
    assert code == 1 and "bad.png" in err and sum(said["bad_images"].values()) == 1
    some = command("shares", config.run_dir, folders / "unlabeled", "--sample", 15)[1]
    assert some["images"] == 15 and some["unseen"] == said["images"] - 15
    other = command("shares", config.run_dir, folders / "unlabeled", "--sample", 15, "--seed", 2)[1]
    assert [r["predicted"] for r in other["rows"]] != [r["predicted"] for r in some["rows"]]
    code, _, err = command("shares", config.run_dir, tmp_path / "bad.png")
    assert code == 1 and "no image could be read" in err


def test_wrong_usage_is_told_before_the_work(
    config: Config, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = next((folders / "unlabeled").glob("*.png"))
    cases: list[tuple[list[object], str]] = [
        (["evaluate", config.run_dir, picture, "--output", tmp_path], "is an image; give a folder"),
    ]
    if not torch.cuda.is_available():
        cases.append((["evaluate", config.run_dir, "--device", "cuda"], "no CUDA device"))
    for words, said in cases:
        assert main([*map(str, words), "--no-figures"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and len(err.splitlines()) == 1


def test_tables_for_people(
    config: Config, folders: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--no-figures", "--output", str(tmp_path)]
    assert main(["evaluate", str(config.run_dir), "--prior", "labeled", *flags]) == 0
    said = capsys.readouterr().out
    assert "mean over classes" in said and "prior labeled" in said and "[" in said
    assert main(["shares", str(config.run_dir), str(folders / "unlabeled"), *flags]) == 0
    said = capsys.readouterr().out
    assert "95 % interval" in said and " to " in said and "calibrated with 100 images" in said
    quiet = [*flags, "--quiet", "--overwrite"]
    assert main(["shares", str(config.run_dir), str(folders / "unlabeled"), *quiet]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["shares", "unlabeled"], ["shares.json", "shares.png"]),
        (["evaluate", "val"], ["confusion.png", "evaluation.json", "reliability.png"]),
    ],
)
def test_nothing_is_replaced_unasked(
    words: list[str],
    names: list[str],
    bare: Path,
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verb, data = words
    flags = ["--output", str(tmp_path), "--threads", "1", "--quiet"]
    arguments = [verb, str(bare), str(folders / data), *flags]
    for name in names:
        (tmp_path / name).write_text("mine")
        assert main(arguments) == 1
        assert f"{name}: exists already" in capsys.readouterr().err
        assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
        (tmp_path / name).unlink()
    module = evaluate if verb == "evaluate" else shares
    real = module.load_model

    def meanwhile(*given: Any, **how: Any) -> Any:
        assert main(arguments) == 1
        (tmp_path / names[-1]).write_text("mine")
        return real(*given, **how)

    monkeypatch.setattr(module, "load_model", meanwhile)
    assert main([*arguments, "--overwrite"]) == 1
    another, changed = capsys.readouterr().err.splitlines()
    assert "another process is writing it" in another and "was changed by somebody" in changed
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
    monkeypatch.undo()
    assert main([*arguments, "--overwrite"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == names
