"""Every command and every line of Python of these pages works, in the order of the page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import simpro_fast
from simpro_fast.config.data import Fit
from simpro_fast.data.augment.crops import Square, whole_square
from tests.conftest import ROOT
from tests.docs.pages import SMALL, run_page

FEW = ("train.period=3", "data.mu=2", "evaluate.shares_images=0")


def test_own_code(tmp_path: Path) -> None:
    run_page("own_code.md", tmp_path, training=["train.steps=6", *FEW])
    run = tmp_path / "runs" / "stripes" / "seed1"
    assert simpro_fast.load_model(run).class_names == ("first", "second", "third")


@pytest.mark.slow
def test_export(tmp_path: Path) -> None:
    small = ("train.steps=2", "train.period=1", "data.batch_size=8", "data.mu=2", *SMALL)
    small += ("data.fit=pad", "data.interpolation=bicubic")
    simpro_fast.train("digits_lt/reversed", *small, f"output_dir={tmp_path / 'runs'}")
    digit = (load_digits().images[3] * 16).clip(0, 255).astype(np.uint8)
    Image.fromarray(digit).resize((40, 30)).save(tmp_path / "picture.png")
    said = run_page("export.md", tmp_path)
    (model,) = simpro_fast.load_model(tmp_path / "digits-model").predict(tmp_path / "picture.png")
    name, probability = list(said.values())[-1].split()
    assert name == model.label
    assert abs(float(probability) - model.probability) < 1e-5


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_export_makes_the_squares_of_evaluation(fit: Fit) -> None:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^short, long = .*?^$", page, flags=re.DOTALL | re.MULTILINE)
    square = Square.of(25, fit, "bilinear", (0.2, 0.4, 0.6))
    for size in ((40, 30), (31, 64), (25, 25), (200, 3), (1, 7)):
        image = Image.effect_noise(size, 60).convert("RGB")
        names: dict[str, Any] = {"image": image, "side": 25, "fit": fit, "Image": Image}
        names |= {"facts": {"fill": square.fill}, "filter": Image.Resampling.BILINEAR}
        exec(code, names)
        assert np.array_equal(names["square"], whole_square(image, square)), size


@pytest.mark.slow
def test_tutorial_digits(tmp_path: Path) -> None:
    said = run_page("tutorial_digits.md", tmp_path, training=["train.steps=6", *FEW])
    rows = (tmp_path / "pictures.csv").read_text().splitlines()
    assert len(rows) == 1 + len(list((tmp_path / "pictures").iterdir())) and rows[0].startswith(
        "path"
    )
    shares = json.loads((tmp_path / "answers" / "shares.json").read_text())
    assert len(shares["rows"]) == 10
    evaluated = json.loads((tmp_path / "answers" / "evaluation.json").read_text())
    assert evaluated["images"] == 400
    assert (tmp_path / "digits.onnx").stat().st_size > 100_000
    assert "pictures/0001.png" in next(
        text for block, text in said.items() if "load_model" in block
    )


@pytest.mark.slow
def test_tutorial_own_images(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    labeled_by_hand = []

    def reader(block: str) -> None:
        """What the page leaves to its reader: labels in queue.csv."""
        if "--add-labels" not in block:
            return
        with (tmp_path / "queue.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows[:8]:
            row["label"] = TRUTH[int(Path(row["path"]).stem.rpartition(" ")[2])]
            labeled_by_hand.append(row["path"])
        with (tmp_path / "queue.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    small = ["train.steps=6", *FEW, "data.image_size=16"]
    said = run_page("tutorial_own_images.md", tmp_path, training=small, before=reader)
    assert len(labeled_by_hand) == 8
    before, after = (
        json.loads((tmp_path / "runs" / name / "seed1" / "summary.json").read_text())
        for name in ("photos", "photos_more_labels")
    )
    assert sum(after["labeled_counts"]) == sum(before["labeled_counts"]) + 8
    labels = (tmp_path / "labels.csv").read_text().splitlines()
    assert len(labels) == 1 + 60 and "zéro" in "".join(labels)
    shares = json.loads((tmp_path / "answers" / "shares.json").read_text())
    assert {row["class"] for row in shares["rows"]} == {"zéro", "one two", "three"}
    hub = simpro_fast.load_model(tmp_path / "photos-model")
    assert hub.class_names == tuple(after["class_names"])
    assert any("photos.onnx" in text for text in said.values())


NAMES = ("zéro", "one two", "three")
TRUTH = [NAMES[digit] for digit in load_digits().target[load_digits().target < 3]]
"""Class of the digit with this number among the zeros, ones and twos."""


def write_photos(folder: Path) -> None:
    """Three digits as photos: 12 + 6 + 3 labeled ones, 30 to validate, 60 unlabeled."""
    digits = load_digits()
    images = digits.images[digits.target < 3]
    wanted = {("labeled", k): count for k, count in enumerate((12, 6, 3))}
    wanted |= {("val", k): 10 for k in range(3)} | {("unlabeled", k): 20 for k in range(3)}
    for i, (image, name) in enumerate(zip(images, TRUTH, strict=True)):
        k = NAMES.index(name)
        part = next((p for p in ("labeled", "val", "unlabeled") if wanted[p, k]), None)
        if part is None:
            continue
        wanted[part, k] -= 1
        place = folder / part / ("" if part == "unlabeled" else name)
        place.mkdir(parents=True, exist_ok=True)
        pixels = (image * 16).clip(0, 255).astype(np.uint8).repeat(5, 0).repeat(5, 1)
        Image.fromarray(pixels).save(place / f"photo {i}.png")
