"""A run folder of a stranger: whatever module its files name, no verb that reads it imports it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from simpro_fast.answers.unlabeled import unlabeled_set
from simpro_fast.cli.entry import main
from simpro_fast.config import load_config
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.utils.errors import ConfigError
from tests.answers.trained import train
from tests.conftest import TINY
from tests.data.image_folders import picture, save

MODULE = "stranger_of_a_run"
NAMES = {"method": f"{MODULE}.Method", "data": f"{MODULE}.load", "model": f"{MODULE}.build"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained")).run_dir


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Is made when the module is imported."""
    marker, folder = tmp_path / "marker", tmp_path / "modules"
    folder.mkdir()
    (folder / f"{MODULE}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(folder))
    yield marker
    sys.modules.pop(MODULE, None)


def named(tree: dict[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """`tree` with the names of the module's objects, and keys that no known method has."""
    for section in sections:
        tree[section] = {**tree[section], "name": NAMES[section]}
    if "method" in sections:
        tree["method"] |= {"sharpness": 3, "variant": "mine"}
    return tree


def spoiled(trained: Path, run: Path, sections: tuple[str, ...]) -> Path:
    """A copy of a run at `run`, whose files name the module in these sections."""
    shutil.copytree(trained, run)
    path = run / "config.yaml"
    path.write_text(json.dumps(named(yaml.safe_load(path.read_text()), sections)))
    described = json.loads((run / "model.json").read_text())
    described["method"] = NAMES["method"]
    if "model" in sections:
        described["model"]["name"] = NAMES["model"]
    (run / "model.json").write_text(json.dumps(described))
    for checkpoint in list_checkpoints(run / "checkpoints"):
        state = read_checkpoint(checkpoint)
        torch.save({**state, "config": named(state["config"], sections)}, checkpoint)
    return run


@pytest.mark.parametrize(
    ("sections", "finished"),
    [(("method", "data"), True), (("method", "data"), False), (("model",), True)],
)
def test_no_verb_imports_what_a_run_names(
    trained: Path,
    marker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sections: tuple[str, ...],
    finished: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    run = spoiled(trained, tmp_path / "runs/tiny/seed1", sections)
    if not finished:
        (run / "summary.json").unlink()
    place, train_tiny = str(run), ["train", "--config", "tiny.yaml"]
    save(tmp_path / "photo.png", picture(0))
    network = int("model" in sections)  # is the stranger's, too
    commands = {
        "watch": (0, ["watch", place, "--once"]),
        "report": (0, ["report", place, "--json"]),
        "evaluate": (1, ["evaluate", place, "--no-figures"]),
        "pseudo": (1, ["pseudo", place]),
        "out of fold": (1, ["predict", place, "--out-of-fold", "2", "--output", "fold.csv"]),
        "predict": (network, ["predict", place, "photo.png", "--output", "out.csv"]),
        "shares": (network, ["shares", place, "photo.png", "--no-figures"]),
        "export": (network, ["export", place, "--hub", "hub"]),
        "train": (2, train_tiny),
        "resume": (2, [*train_tiny, f"checkpoint.resume={run}/checkpoints"]),
    }
    for what, (code, words) in commands.items():
        ended = main(words)
        said = capsys.readouterr()
        assert ended == code, (what, said.err)
        assert "Traceback" not in said.err, what
        assert not marker.exists() and MODULE not in sys.modules, what
        if what in ("pseudo", "evaluate", "out of fold"):
            assert "code outside simpro_fast; if you trust it, give --trust-code" in said.err


def test_code_is_imported_where_the_command_says_so(
    trained: Path, marker: Path, tmp_path: Path
) -> None:
    """So the module above would have been found."""
    run = spoiled(trained, tmp_path / "run", ("data",))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(named({**TINY}, ("method",))))
    for read in (
        lambda: unlabeled_set(run, trust_code=True),
        lambda: load_config(tmp_path / "mine.yaml"),
    ):
        with pytest.raises(ConfigError, match=f"{MODULE} has no "):
            read()
        assert marker.exists()
        marker.unlink()
        del sys.modules[MODULE]
