"""Small pictures that a run leaves for its report: training views and confident mistakes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from simpro_fast.answers.report.runs import Run
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.npz import read_npz
from simpro_fast.utils.printable import printables

FOLDER = "report"
"""In a run directory: its pictures, its figures and its page."""
VIEWS, MISTAKES = "views.npz", "mistakes.npz"
SIDE = 96
"""Pixels that a kept picture has at most on a side."""
_LOSSLESS = 48


@dataclass(frozen=True)
class TrainingViews:
    """A few training images with the views that the network sees, before normalisation."""

    original: np.ndarray
    """uint8 [n, H, W, 3]."""
    weak: np.ndarray
    """uint8 [n, H, W, 3]."""
    strong: np.ndarray
    """uint8 [n, V, H, W, 3]."""
    titles: Sequence[str]
    """n class names."""
    captions: Sequence[Sequence[str]] | None = None
    """[n][V]: what was done to each strong view, operations and levels, separated by a comma."""
    side: int | None = None
    """Pixels on a side that the network sees; None: those of the arrays."""


@dataclass(frozen=True)
class Mistakes:
    """The most confident mistakes on the test images, the most confident first."""

    images: np.ndarray
    """uint8 [n, H, W, 3]."""
    labels: np.ndarray
    """int64 [n]."""
    predicted: np.ndarray
    """int64 [n]."""
    probability: np.ndarray
    """float64 [n] of the prediction, 0 to 1."""


def save_views(views: TrainingViews, folder: Path) -> None:
    """Write `views.npz`, at most `SIDE` pixels on a side. Raises as `replacing` does."""
    words = {"titles": list(views.titles), "captions": views.captions}
    strong = views.strong
    with replacing(folder / VIEWS) as file:
        np.savez_compressed(
            file,
            original=thumbnails(views.original),
            weak=thumbnails(views.weak),
            strong=np.stack([thumbnails(strong[:, v]) for v in range(strong.shape[1])], axis=1),
            side=np.int64(views.side or views.original.shape[1]),
            words=np.frombuffer(json.dumps(words).encode(), np.uint8),
        )


def save_mistakes(mistakes: Mistakes, folder: Path) -> None:
    """Write `mistakes.npz`, at most `SIDE` pixels on a side. Raises as `replacing` does."""
    with replacing(folder / MISTAKES) as file:
        np.savez_compressed(
            file,
            images=thumbnails(mistakes.images),
            labels=mistakes.labels,
            predicted=mistakes.predicted,
            probability=mistakes.probability,
        )


def load_views(folder: Path) -> TrainingViews | None:
    """Read what `save_views` wrote; None without the file.

    Raises:
        UserError: the file is damaged.
    """
    arrays = _read(folder / VIEWS, "original", "weak", "strong", "words", "side")
    if arrays is None:
        return None
    original, weak, strong, text, side = arrays
    words = printables(json.loads(text.tobytes()))
    return TrainingViews(original, weak, strong, words["titles"], words["captions"], int(side))


def load_mistakes(folder: Path) -> Mistakes | None:
    """Read what `save_mistakes` wrote; None without the file.

    Raises:
        UserError: the file is damaged.
    """
    arrays = _read(folder / MISTAKES, "images", "labels", "predicted", "probability")
    return None if arrays is None else Mistakes(*arrays)


def pictures_of(run: Run) -> tuple[TrainingViews | None, Mistakes | None, list[str]]:
    """Read the pictures that a run has left, and what is wrong with them."""
    try:
        return load_views(run.path / FOLDER), load_mistakes(run.path / FOLDER), []
    except UserError as error:
        return None, None, [f"{error}: its pictures are left out"]


def data_uri(image: np.ndarray) -> str:
    """A data: address of one picture, uint8 [h, w, 3]; small ones without any loss."""
    file = io.BytesIO()
    kind = "png" if max(image.shape[:2]) <= _LOSSLESS else "jpeg"
    Image.fromarray(image).save(file, kind, **({"quality": 88} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def thumbnails(images: np.ndarray) -> np.ndarray:
    """uint8 [n, h, w, 3] with at most `SIDE` pixels on a side, unchanged where they fit."""
    height, width = images.shape[1:3]
    if max(height, width) <= SIDE or not len(images):
        return images
    scale = SIDE / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    resized = [Image.fromarray(image).resize(size, Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(image) for image in resized])


def _read(path: Path, *names: str) -> list[np.ndarray] | None:
    try:
        arrays = read_npz(path)
        return [arrays[name] for name in names]
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error})") from None
