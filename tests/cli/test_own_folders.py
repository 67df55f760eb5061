"""Own folders from the command line: what is noticed before it costs a run, and labels added."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from simpro_fast.cli import prepare
from simpro_fast.cli.train import main as train
from simpro_fast.data.files.manifest import read_manifest
from tests.data.image_folders import picture, save, tidy

SHORT = ["train.steps=2", "train.period=1", "model.name=small_cnn", "data.image_size=16"]
SHORT += ["log.figures=false", "log.tensorboard=false", "distributed.engine=plain"]
SHORT += ["train.threads=1"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tidy(tmp_path / "photos", unlabeled=12)


def run(root: Path, *arguments: str) -> int:
    folders = [f"--labeled={root}/labeled", f"--unlabeled={root}/unlabeled", f"--val={root}/val"]
    return prepare.main([*folders, f"--output={root}/out", "--threads=2", *arguments])


def error(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and said.startswith("error: ") and said[:-1].isprintable()
    return said


def test_labels_join_and_training_goes_on_from_the_model(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepare, train, label what the model is unsure of, prepare, train on from its weights."""
    assert run(root, f"--init-config={root}/own.yaml") == 0
    assert train([f"--config={root}/own.yaml", "name=first", *SHORT]) == 0
    weights = Path("runs/first/seed1/model.safetensors")
    queue = root / "queue.csv"
    with queue.open("w", newline="") as file:
        lines = csv.writer(file, delimiter=";")  # as a spreadsheet saves it
        lines.writerow(["path", "member", "label", "pseudo_class"])
        lines.writerow([f"{root}/unlabeled/003.jpg", "", "owls", "cats"])
        lines.writerow(["../unlabeled/004.jpg", "", "catz", "dogs"])
        lines.writerow(["../unlabeled/005.jpg", "", "", "dogs"])
    before = {path: path.read_bytes() for path in (root / "out").iterdir()}
    capsys.readouterr()
    command = [f"--add-labels={queue}", f"--output={root}/out", "--threads=2"]
    assert prepare.main(command) == 1
    assert "line 3, ../unlabeled/004.jpg: class 'catz' is unknown (a new one needs" in error(capsys)
    assert {path: path.read_bytes() for path in (root / "out").iterdir()} == before
    queue.write_text(queue.read_text().replace("catz", "cats"))
    for added, known in ((2, 0), (0, 2)):
        assert prepare.main(command) == 0
        said = capsys.readouterr().out
        assert f"{added} added" in said and f"{known} known before" in said
        assert "0 files decoded" in said
        assert "3 classes, 14 labeled, 10 unlabeled, 6 val images" in said
    manifest = (root / "out/manifest.csv").read_bytes()
    assert run(root) == 0, "a new look at the folders, where they still lie unlabeled"
    assert (root / "out/manifest.csv").read_bytes() == manifest
    again = [f"--config={root}/own.yaml", "name=second", f"model.weights={weights}", *SHORT]
    capsys.readouterr()
    assert train(again) == 0
    assert "tensors matched" in (said := capsys.readouterr().out) and "dropped" not in said
    summary = json.loads(Path("runs/second/seed1/summary.json").read_text())
    assert summary["labeled_counts"] == [6, 4, 4]
    assert train([f"--config={root}/own.yaml", "name=first", *SHORT, "train.steps=3"]) == 1
    assert "was trained on another data" in error(capsys), "the old run is not taken for the new"


def test_labels_without_a_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "queue.csv").write_text("path,label\n../unlabeled/003.jpg,cats\n")
    assert prepare.main([f"--add-labels={root}/queue.csv", f"--output={root}/out"]) == 1
    assert "manifest.csv: cannot be read" in error(capsys)
    assert run(root, f"--add-labels={root}/queue.csv") == 0, "with the folders in one command"
    assert len(read_manifest(root / "out/manifest.csv").rows) == 12 + 6 + 12
    assert "13 labeled, 11 unlabeled" in capsys.readouterr().out
    (root / "queue.csv").write_text("path,label\n../unlabeled/004.jpg,bees\n")
    command = [f"--add-labels={root}/queue.csv", f"--output={root}/out"]
    assert prepare.main(command) == 1 and "--new-classes" in error(capsys)
    assert prepare.main([*command, "--new-classes"]) == 0
    assert "bees" in read_manifest(root / "out/manifest.csv").class_names


def test_copy_of_a_labeled_image_is_found(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be trained on twice: with its label, and as an unlabeled image."""
    shutil.copy(root / "unlabeled/003.jpg", root / "unlabeled/copy.jpg")
    assert run(root) == 0
    (root / "queue.csv").write_text("path,label\n../unlabeled/003.jpg,cats\n")
    command = [f"--add-labels={root}/queue.csv", f"--output={root}/out", "--threads=2"]
    manifest = (root / "out/manifest.csv").read_bytes()
    capsys.readouterr()
    assert prepare.main(command) == 1
    said = capsys.readouterr()
    assert "copy.jpg: duplicate: also labeled as" in said.out and "--on-bad-image skip" in said.err
    assert (root / "out/manifest.csv").read_bytes() == manifest
    assert not (root / "out/added_labels.csv").exists()
    assert prepare.main([*command, "--on-bad-image=skip"]) == 0
    assert "1 added" in capsys.readouterr().out


def test_images_of_one_pixel_are_pictures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decoded alike by both decoders, packed, and trained on from files."""
    for ending in ("jpg", "png", "bmp", "webp"):
        save(root / f"unlabeled/one.{ending}", picture(7, 1, 1))
    save(root / "labeled/cats/line.png", picture(8, 40, 1))
    save(root / "val/cats/line.png", picture(9, 1, 40))
    # Equal pixels in two formats are no copies: their bytes differ.
    assert run(root, "--pack=8", f"--init-config={root}/own.yaml") == 0
    assert "13 labeled, 16 unlabeled, 7 val images" in capsys.readouterr().out
    steps = [f"--config={root}/own.yaml", "name=one", *SHORT, "train.steps=4"]
    assert train([*steps, "data.packed=null", "data.batch_size=8"]) == 0


def test_file_twice_in_a_source_counts_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlabeled = [f"{root}/unlabeled", f"{root}/unlabeled/", f"{root}/./unlabeled", f"{root}"]
    arguments = [f"--labeled={root}/labeled", f"--val={root}/val", f"--output={root}/out"]
    assert prepare.main([*arguments, "--threads=2", "--unlabeled", *unlabeled]) == 0
    said = capsys.readouterr().out
    assert "12 labeled, 12 unlabeled, 6 val images, 18 ignored" in said
    assert "18 unlabeled that is also in the labeled or val folder" in said
    (root / "list.csv").write_text("path\nunlabeled/000.jpg\n./unlabeled/../unlabeled/000.jpg\n")
    config = ["data.name=images", f"data.manifest={root}/list.csv", "data.test_per_class=null"]
    assert train(["--config=digits_lt/reversed", *config, *SHORT]) == 1
    assert "line 3: " in (told := error(capsys)) and "is listed twice; remove one" in told
