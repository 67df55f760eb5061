"""Every command and every line of Python of these pages works, in the order of the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import simpro_fast
from tests.docs.pages import SMALL, run_page


def test_own_code(tmp_path: Path) -> None:
    run_page("own_code.md", tmp_path, training=["train.steps=6", "train.period=3", "data.mu=2"])
    run = tmp_path / "runs" / "stripes" / "seed1"
    assert simpro_fast.load_model(run).class_names == ("first", "second", "third")


def test_export(tmp_path: Path) -> None:
    small = ("train.steps=2", "train.period=1", "data.batch_size=8", "data.mu=2", *SMALL)
    simpro_fast.train(
        "digits_lt/reversed", *small, "log.figures=false", f"output_dir={tmp_path / 'runs'}"
    )
    digit = (load_digits().images[3] * 16).clip(0, 255).astype(np.uint8)
    Image.fromarray(digit).resize((40, 30)).save(tmp_path / "picture.png")
    said = run_page("export.md", tmp_path)
    (model,) = simpro_fast.load_model(tmp_path / "digits-model").predict(tmp_path / "picture.png")
    name, probability = list(said.values())[-1].split()
    assert name == model.label
    assert abs(float(probability) - model.probability) < 1e-5
