"""`load_model`: the same pixels and logits as in evaluation, and what damaged models say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from simpro_fast import load_model
from simpro_fast.answers.evaluation import evaluate
from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.model_file import write_weights
from simpro_fast.config.schema import Config
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.build import make_split
from simpro_fast.utils.errors import ConfigError, UserError
from tests.answers.trained import train


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def model(config: Config) -> TrainedModel:
    return load_model(config.run_dir)


@pytest.fixture(scope="module")
def test_set(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of the run's test images."""
    dataset = load_dataset(config.data)
    rows = make_split(config.data, dataset, config.seed).test
    images, labels = dataset.test_part
    return select(images, rows)[0 : len(rows)], labels[rows]


def test_it_gives_the_accuracy_and_the_logits_of_the_run(
    config: Config, model: TrainedModel, test_set: tuple[np.ndarray, np.ndarray]
) -> None:
    pixels, labels = test_set
    summary = json.loads((config.run_dir / "summary.json").read_text())
    seen: list[torch.Tensor] = []
    hook = model.module.register_forward_hook(lambda *a: seen.append(a[2].clone()))
    file = model.file
    found = evaluate(
        model.module,
        pixels,
        labels,
        mean=file.mean,
        std=file.std,
        num_classes=10,
        device="cpu",
        batch_size=64,
    )
    hook.remove()
    assert found.top1 == summary["top1"]
    mine = torch.cat([model.logits(pixels[i : i + 64]) for i in range(0, len(pixels), 64)])
    assert torch.equal(mine, torch.cat(seen))


def test_files_and_arrays_are_seen_alike(
    model: TrainedModel, test_set: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    pixels = test_set[0][:5]
    files = []
    for i, image in enumerate(pixels):
        files.append(tmp_path / f"picture {i} é.png")
        Image.fromarray(image).save(files[-1])
    from_files, from_arrays = model.predict(files), model.predict(pixels)
    expected = model.probabilities(model.logits(pixels))
    for i, (one, other) in enumerate(zip(from_files, from_arrays, strict=True)):
        np.testing.assert_array_equal(one.probabilities, other.probabilities)
        np.testing.assert_array_equal(one.probabilities, expected[i])
        assert one.label == model.class_names[one.class_id] and one.class_id == expected[i].argmax()
        assert one.probability == one.probabilities.max()
    alone = model.predict(files[0])
    assert len(alone) == 1 and model.predict(pixels[0])[0].label == alone[0].label
    gray = model.preprocess(np.full((40, 20), 7, np.uint8))
    assert gray.shape == (16, 16, 3) and (gray == 7).all()
    assert model.preprocess(Image.new("L", (1, 1), 9)).shape == (16, 16, 3)
    for wrong in (np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4), np.uint8)):
        with pytest.raises(ValueError, match="image"):
            model.preprocess(wrong)


def test_what_the_file_says(config: Config, model: TrainedModel) -> None:
    text = (config.run_dir / "model.json").read_text()
    content = json.loads(text)
    assert content["format"] == 3 and content["tau"] == 1.0 and content["method"] == "simpro"
    assert "weights" not in content["model"] and str(config.output_dir) not in text
    assert sum(content["labeled_prior"]) == pytest.approx(1)
    assert {"torch", "simpro_fast"} <= content["versions"].keys()
    assert load_model(config.run_dir / "model.safetensors", "cpu").class_names == model.class_names


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return edit


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def changed(
    change: Callable[[torch.Tensor], torch.Tensor], *, described: bool = True
) -> Callable[[Path], None]:
    """Weights of the same network, one changed, and with `described` the hash as well."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in weights if name.endswith("weight"))
        sha256 = write_weights(path, {**weights, name: change(weights[name])})
        if described:
            edited(weights_sha256=sha256)(folder)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (edited(format=1), "of format 1, this version reads format 3"),
        (edited(format=None), "of no format"),
        (edited(weights_sha256=None), "weights_sha256: Field required"),
        (edited(mean=[math.nan, 0.0, 0.0]), "mean.0: Input should be a finite number"),
        (edited(class_names=[*map(str, range(9))]), "labeled_prior must be 9 shares"),
        (edited(class_names=["a"] * 10), "different names"),
        (edited(pi_u=[0.0] * 10), "pi_u must be 10 shares with a positive sum"),
        (edited(confusion=[[1]]), "confusion must be 10 x 10"),
        (edited(confusion=[[-1] * 10] * 10), "confusion must hold no count below 0"),
        (edited(image_size=10**7), "image_size: Input should be less than or equal to 4096"),
        (edited(std=[0.0, 1.0, 1.0]), "std must be positive"),
        (edited(tau="high"), "tau"),
        (edited(model={"name": "wrn_10_1"}), "does not belong to the model.json"),
        (cut, "model.safetensors: its sha256 is not the one in model.json"),
        (changed(lambda weight: weight * 1.01, described=False), "or of another model"),
        (changed(lambda weight: weight * math.nan), "weight has values that are not finite"),
        (changed(lambda weight: weight / 0), "weight has values that are not finite"),
        (changed(lambda weight: weight.double()), "weight is torch.float64 ["),
        (changed(lambda weight: weight.to(torch.int8)), "weight is torch.int8 ["),
        (lambda folder: (folder / "model.json").unlink(), "model.json: does not exist"),
        (lambda folder: (folder / "model.json").write_text("{"), "no JSON"),
        (lambda folder: (folder / "model.json").write_text("[" * 100_000), "no JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "not finished"),
        (lambda folder: shutil.rmtree(folder), "no such model"),
    ],
)
def test_a_damaged_model_is_one_line(
    config: Config, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(config.run_dir, folder)
    damage(folder)
    with pytest.raises(UserError) as caught:
        load_model(folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_training_again_writes_weights_and_description_that_belong_together(
    config: Config, tmp_path: Path
) -> None:
    """After a kill between the two there is no summary; in a finished run it is to be removed."""
    output = tmp_path / "runs"
    shutil.copytree(config.output_dir, output)
    folder = output / config.run_dir.relative_to(config.output_dir)
    before = load_model(folder).file
    changed(torch.neg, described=False)(folder)
    with pytest.raises(UserError, match=r"remove summary\.json.*start the training command again"):
        load_model(folder)
    (folder / "summary.json").unlink()
    train(tmp_path)
    assert load_model(folder).file == before


def test_a_class_whose_folder_is_no_utf_8_has_a_digest(config: Config, tmp_path: Path) -> None:
    shutil.copytree(config.run_dir, tmp_path / "copy")
    edited(class_names=["caf\udce9", *map(str, range(9))])(tmp_path / "copy")
    model = load_model(tmp_path / "copy")
    assert model.class_names[0] == "caf\udce9" and len(model.digest()) == 64


def test_other_paths_are_no_models(config: Config, tmp_path: Path) -> None:
    for path, said in (
        (config.run_dir / "summary.json", "not a model"),
        (tmp_path, "give a run directory"),
        (tmp_path / "nothing", "no such model"),
    ):
        with pytest.raises(UserError, match=said):
            load_model(path)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            load_model(config.run_dir, "cuda")
