"""The unlabeled images that a run was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simpro_fast.answers.model_file import DESCRIPTION, read_model_file
from simpro_fast.config import Config, load_config
from simpro_fast.config.methods import METHODS
from simpro_fast.config.saved import read_saved_config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import FileImages, ImageListDataset
from simpro_fast.data.datasets.registry import dataset_names, load_dataset
from simpro_fast.data.files.manifest import Row
from simpro_fast.data.files.square import read_square
from simpro_fast.data.splits.split import Split, load_split
from simpro_fast.models import needs_import
from simpro_fast.run.files import ENVIRONMENT, read_environment
from simpro_fast.utils.errors import UserError


@dataclass(frozen=True)
class UnlabeledSet:
    """The unlabeled images of a run but for those that are labeled as well."""

    config: Config
    dataset: ArrayDataset
    split: Split
    dataset_rows: np.ndarray
    """int64 [n], ascending where the split is."""

    @property
    def listed(self) -> tuple[Row, ...] | None:
        """One row per dataset row, where the images are files; None: an array without names."""
        dataset = self.dataset
        return dataset.manifest.rows if isinstance(dataset, ImageListDataset) else None

    def pixels(self, dataset_row: int) -> np.ndarray:
        """uint8 [S, S, 3], what evaluation sees of one image. Raises `UnreadableImage`."""
        return square_of(self.dataset.unlabeled_pool, dataset_row)


def square_of(images: np.ndarray, row: int) -> np.ndarray:
    """One image of an array, or one file of `FileImages`, uint8 [S, S, 3]. `UnreadableImage`."""
    if isinstance(images, FileImages):
        listed = images.rows[row]
        return read_square(listed.image, images.square, (listed.width, listed.height))
    return np.asarray(images[row])


def unlabeled_set(run_dir: Path, *, trust_code: bool = False) -> UnlabeledSet:
    """The images that a run was trained on, by its `config.yaml`, `split.npz` and `model.json`.

    Args:
        trust_code: import the data set's loader, the method and the network where they are code of
            somebody's own. Whoever wrote `config.yaml` has chosen the modules.

    Raises:
        UserError: not the directory of a finished run, the data set is another one by now, or code
            that is not trusted would be needed.
    """
    config_path = run_dir / "config.yaml"
    if not config_path.is_file():
        raise UserError(f"{run_dir}: not a run directory (it has no config.yaml)")
    config = read_saved_config(config_path)
    foreign = [
        *([f"method {config.method.name}"] if config.method.name not in METHODS else []),
        *([f"data set {config.data.name}"] if config.data.name not in dataset_names() else []),
        *([f"network {config.model.name}"] if needs_import(config.model.name) else []),
    ]
    if foreign and not trust_code:
        raise UserError(
            f"{run_dir}: its {' and '.join(foreign)} is code outside simpro_fast; if you trust "
            "it, give --trust-code"
        )
    if foreign:
        config = load_config(config_path)
    split = load_split(run_dir)
    file = read_model_file(run_dir / DESCRIPTION)
    seen = {"mean": file.mean, "std": file.std, "interpolation": file.interpolation}
    dataset = load_dataset(config.data.model_copy(update=seen))
    trained_on = read_environment(run_dir / ENVIRONMENT).get("data")
    if dataset.fingerprint() != trained_on:
        raise UserError(
            f"{run_dir}: its images are not those it was trained on any more (labels were added, "
            "or files changed); train on what there is now, and ask that run"
        )
    rows = split.unlabeled
    if dataset.unlabeled_images is None:  # with data.overlap the labeled ones are among them
        rows = rows[~np.isin(rows, split.labeled)]
    return UnlabeledSet(config, dataset, split, rows)
