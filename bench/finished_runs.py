"""What the benches of class shares have of a finished run: its network, images and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simpro_fast.answers.labeled import LabeledLogits
from simpro_fast.answers.model import TrainedModel, load_model
from simpro_fast.answers.unlabeled import unlabeled_set
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import git_commit

PER_CLASS = 100
"""Images of each class that estimates are calibrated with."""


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run directory in use, on the CPU."""

    folder: Path
    model: TrainedModel
    """The averaged network, with the method's test rule folded in."""
    dataset: ArrayDataset
    split: Split

    def logits(self, images: np.ndarray, dataset_rows: np.ndarray) -> np.ndarray:
        """float32 [n, K] of rows int64 [n] of `images`, uint8 [N, S, S, 3]."""
        parts = np.array_split(dataset_rows, max(1, len(dataset_rows) // 500))
        return np.concatenate([self.model.logits(images[rows]).numpy() for rows in parts])


def open_run(folder: Path) -> FinishedRun:
    """Read a run directory, and the data set that its configuration names.

    Raises:
        UserError: a file of either is missing or damaged.
    """
    trained = unlabeled_set(folder)
    return FinishedRun(folder, load_model(folder, "cpu"), trained.dataset, trained.split)


def calibrate(run: FinishedRun, rng: np.random.Generator) -> LabeledLogits:
    """`PER_CLASS` images of each class of the test part, which training has not seen.

    Raises:
        UserError: it has fewer.
    """
    images, labels = run.dataset.test_part
    found = labels[run.split.test]
    drawn = []
    for k, name in enumerate(run.dataset.class_names):
        rows = run.split.test[found == k]
        if len(rows) < PER_CLASS:
            raise UserError(
                f"{run.folder}: its test part has {len(rows)} images of {name}, and {PER_CLASS} "
                "are needed to calibrate with; take runs with a larger test part"
            )
        drawn.append(rng.choice(rows, PER_CLASS, False))
    chosen = np.concatenate(drawn)
    return LabeledLogits(run.logits(images, chosen), labels[chosen])


def stamps() -> dict[str, Any]:
    """The last columns of a line: with what it was measured."""
    return {
        "commit": git_commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": machine_name(),
    }


def stamped(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines: all values of these columns, and the commits that the runs were made at."""
    values = {
        key: sorted({str(line[key]) for line in lines})
        for key in ("machine", "torch", "numpy", "commit", "trained_at")
    }
    return [f"{key}: {', '.join(found)}  " for key, found in values.items()]
