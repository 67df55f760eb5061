"""A network that has learned nothing is called so wherever its accuracy is shown or used."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpro_fast.cli.entry import main
from tests.data.image_folders import tidy

SAID = "warning: this network has not learned to tell the classes apart"
STEPS = ("train.steps=1", "train.period=1", "train.threads=1", "distributed.engine=plain")
QUICK = ("log.tensorboard=false", "log.figures=false", "log.progress=off", "data.mu=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failed")
    train = ["digits_lt/reversed", f"output_dir={folder}", "name=failed", *STEPS, *QUICK]
    assert main(["train", *train, "evaluate.shares_images=0", "optim.lr=1e-6"]) == 0
    return folder / "failed/seed1"


@pytest.mark.parametrize(
    "words",
    [
        "train digits_lt/reversed",
        "report RUN --output FOLDER/report",
        "evaluate RUN --output FOLDER --no-figures",
        "shares RUN FOLDER/photos/unlabeled --output FOLDER --no-figures",
        "predict RUN FOLDER/photos/unlabeled --output FOLDER/labels.csv",
        "pseudo RUN --output FOLDER/pseudo.csv",
        "export RUN --hub FOLDER/hub",
    ],
    ids=lambda words: words.partition(" ")[0],
)
def test_chance_is_said(
    words: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words.startswith("train"):
        words += " output_dir=FOLDER evaluate.shares_images=0 optim.lr=1e-6 "
        words += " ".join((*STEPS, *QUICK))
    else:
        tidy(tmp_path / "photos", unlabeled=4)
    words = words.replace("RUN", str(run)).replace("FOLDER", str(tmp_path))
    assert main(words.split()) == 0
    said = capsys.readouterr()
    assert SAID in " ".join((said.out + said.err).split())
    if words.startswith("predict"):
        assert said.err.splitlines()[-1].startswith(SAID)
    if words.startswith("export"):
        assert "not learned to tell the classes" in (tmp_path / "hub/README.md").read_text()
