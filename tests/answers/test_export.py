"""`export`: ONNX that computes the same, a folder for a hub, the model card of every run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from simpro_fast import load_model
from simpro_fast.answers import onnx_file
from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.model_card import model_card
from simpro_fast.answers.model_file import ModelFile
from simpro_fast.answers.onnx_file import write_onnx
from simpro_fast.answers.report.runs import load_run
from simpro_fast.cli.entry import run as run_verb
from simpro_fast.config.schema import ModelConfig
from simpro_fast.models import build_model
from tests.answers.trained import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder, evaluate={"shares_images": 100}).run_dir


def description(**changes: Any) -> ModelFile:
    names = ("egret", "heron", "stork é")
    values: dict[str, Any] = {
        **{"model": ModelConfig(), "method": "simpro", "class_names": names, "image_size": 32},
        **{"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3), "labeled_prior": (0.7, 0.2, 0.1)},
        **{"phi": (0.5, 0.3, 0.2), "pi_u": (0.2, 0.3, 0.5), "tau": 2.0, "step": 7},
        **{"weights_sha256": 64 * "0", "fit": "crop", "interpolation": "bilinear"},
    }
    return ModelFile(**{**values, **changes})


def used_model(network: ModelConfig, size: int) -> TrainedModel:
    """Some network with statistics and weights that differ between channels."""
    module = build_model(network, 3, size)
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_(0, 0.1, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
            nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
    return TrainedModel(module, description(model=network, image_size=size), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "size", "activation"),
    [
        pytest.param("small_cnn", 16, "silu", marks=pytest.mark.slow),
        ("wrn_10_2", 32, None),
        pytest.param("resnet50_3x3", 32, None, marks=pytest.mark.slow),
        ("timm/resnet18", 64, None),
    ],
)
def test_onnx_computes_the_same_for_any_number_of_images(
    name: str, size: int, activation: Any, tmp_path: Path
) -> None:
    model = used_model(ModelConfig(name=name, activation=activation), size)
    path = tmp_path / "new" / "model.onnx"
    assert 0 <= write_onnx(model, path) < 1e-3
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [size, size, 3])
    random = np.random.default_rng(3)
    for count in (1, 2, 7):
        pixels = random.integers(0, 256, (count, size, size, 3), np.uint8)
        logits, probabilities = session.run(["logits", "probabilities"], {"images": pixels})
        expected = model.logits(pixels).numpy()
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(logits / scale, expected / scale, atol=1e-5)
        np.testing.assert_allclose(probabilities, model.probabilities(expected), atol=1e-4)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["class_names"]) == ["egret", "heron", "stork é"]
    assert json.loads(metadata["fit"]) == "crop" and json.loads(metadata["fill"]) == [0, 0, 0]
    assert json.loads(metadata["image_size"]) == size and json.loads(metadata["tau"]) == 2.0


def test_a_graph_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = used_model(ModelConfig(name="small_cnn"), 16)
    graph = onnx_file._graph(model)
    with torch.no_grad():
        next(model.module.parameters()).mul_(1.01)
    monkeypatch.setattr(onnx_file, "_graph", lambda model: graph)
    with pytest.raises(ValueError, match="computes something else"):
        write_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_hub_folder_is_read_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, onnx_path = tmp_path / "hub", tmp_path / "model.onnx"
    assert run_verb("export", [str(run), "--hub", str(hub), "--onnx", str(onnx_path)]) == 0
    names = {"model.safetensors", "model.json", "config.json", "README.md"}
    assert {path.name for path in hub.iterdir()} == names
    capsys.readouterr()
    model, again = load_model(run), load_model(hub)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    assert torch.equal(model.logits(pixels), again.logits(pixels)) and model.file == again.file
    config = json.loads((hub / "config.json").read_text())
    assert config["id2label"]["3"] == "3" and config["label2id"]["9"] == 9
    assert (hub / "README.md").read_text() == (run / "README.md").read_text()
    # What a folder of export was made of can be exported again, in place of another.
    arguments = [str(hub / "model.safetensors"), "--hub", str(tmp_path / "two"), "--json"]
    assert run_verb("export", arguments) == 0
    assert len(json.loads(capsys.readouterr().out)["hub"]) == 4
    assert run_verb("export", arguments) == 1
    assert "two: exists already" in capsys.readouterr().err
    assert run_verb("export", [*arguments, "--overwrite"]) == 0


def other_format(model: Path) -> None:
    content = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps({**content, "format": 1}))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "nothing to write; give --onnx FILE, --hub DIR"),
        (["--onx", "f"], 2, "unknown argument --onx; did you mean --onnx"),
        (["--onnx", "taken/file"], 1, "taken/file: exists already"),
        (["--onnx", "taken"], 2, "taken: is a folder"),
        (["--hub", "taken"], 1, "taken: exists already"),
        (["--hub", "taken/file"], 2, "taken/file: is no folder"),
        (["--hub", "hub", "--overwrite"], 1, "README.md: does not exist; every run has a model"),
        (["--onnx", "f"], 1, "of format 1, this version reads format 3"),
        (["--onnx", "f"], 1, "--onnx needs onnxscript: `pip install 'onnx>=1.16' "),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    def no_work(*_: object) -> None:
        raise AssertionError("the network was exported before the output was looked at")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onnx_file, "_graph", no_work)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    model = tmp_path / "model"
    shutil.copytree(run, model)
    if "README" in said:
        (model / "README.md").unlink()
    if "format" in said:
        other_format(model)
    if "onnxscript" in said:
        there = onnx_file.importlib.util.find_spec
        monkeypatch.setattr(
            onnx_file.importlib.util,
            "find_spec",
            lambda name: None if name == "onnxscript" else there(name),
        )
    assert run_verb("export", [str(model), *arguments]) == code
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
    assert (tmp_path / "taken" / "file").read_text() == "mine"
    assert not (tmp_path / "hub").exists() and not (tmp_path / "f").exists()


def front_matter(card: str) -> dict[str, Any]:
    start, head, _ = card.split("---\n", 2)
    assert not start
    content: dict[str, Any] = yaml.safe_load(head)
    return content


def test_every_run_has_a_card(run: Path) -> None:
    card = (run / "README.md").read_text()
    head = front_matter(card)
    assert head["pipeline_tag"] == "image-classification" and head["library_name"] == "simpro_fast"
    summary = json.loads((run / "summary.json").read_text())
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(summary["top1"] / 100, abs=1e-4)
    assert f"| {summary['top1']:.1f} | {summary['top1_class_mean']:.1f} |" in card
    assert str(run) not in card and str(run.parents[2]) not in card and "/" + "tmp" not in card


def test_nothing_in_the_card_acts_as_markup(
    run: Path,
) -> None:
    names = ("a|b", "<img src=x>", "e\n\n# forged\n`x`")
    summary = {
        **load_run(run).summary,
        **{
            "name": "a|b\n\n# forged <img src=x>",
            "labeled_counts": [9, 4, 100],
            "unlabeled_counts": None,
            "kl_pi_u": None,
            "shares": None,
        },
        **{"per_class": None, "top1": None, "pi_u": [0.25, 0.25, 0.5]},
    }
    card = model_card(description(class_names=names), summary, "images")
    assert "3 classes" in card and "Not measured" in card
    assert "113 labeled images and unlabeled images from its maker's own files (" in card
    assert "<img" not in card and "\n# forged" not in card and "model-index" not in card
    calibrated = model_card(description(class_names=names, temperature=1.5), summary, "images")
    assert "temperature 1.50" in calibrated
    padded = model_card(description(class_names=names, fit="pad"), summary, "images")
    assert "largest centred square" in card and "bars of the colour RGB (102, 128, 153)" in padded
