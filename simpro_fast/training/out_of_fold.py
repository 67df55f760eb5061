"""Predictions of labeled images by heads that have not seen them: k folds on cached features."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import numpy as np
import torch

from simpro_fast.config import Config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.features import FeatureDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def out_of_fold_logits(
    config: Config, dataset: ArrayDataset, split: Split, ranks: Ranks, folds: int
) -> np.ndarray:
    """Train `folds` heads, each without a fold of the labeled images, and ask each for its fold.

    Folds are drawn by the seed, class by class; the unlabeled images are in all of them. Nothing is
    written.

    Args:
        config, dataset, split: of a finished run, the images before the backbone.

    Returns:
        logits, float32 [N, K], of the labeled images of the split.

    Raises:
        ConfigError: without `train.features`, whole networks would be trained; or a class has
            fewer than two labeled images, or there are fewer of them than folds, or one fold.
        UserError: as a training.
    """
    if config.train.features is None:
        raise ConfigError(
            "--out-of-fold trains one network per fold, which is for cached features; set "
            "train.features=auto in the run's configuration (docs/finetuning.md)"
        )
    if not 2 <= folds <= len(split.labeled):
        raise ConfigError(
            f"--out-of-fold {folds}: the run has {len(split.labeled)} labeled images, and so many "
            "folds at most; two at least"
        )
    few = [k for k, count in enumerate(split.labeled_counts) if count == 1]
    if few:
        raise ConfigError(
            f"class {few[0]} ({dataset.class_names[few[0]]}) has one labeled image, and whoever "
            "predicts it must not have seen it; label a second one"
        )
    logits = np.full((len(split.labeled), dataset.num_classes), np.nan, np.float32)
    fold = fold_of(dataset.labels[split.labeled], folds, config.seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(folds):
            logger.info("fold %d of %d", number + 1, folds)
            lists = Path(folder) / "split.npz"
            kept, asked = split.labeled[fold != number], split.labeled[fold == number]
            np.savez(lists, labeled=kept, unlabeled=split.unlabeled, test=split.test)
            trainer = Trainer(_without(config, lists), ranks, write=False)
            try:
                trainer.fit()
                found = trainer.setup.dataset
                assert isinstance(found, FeatureDataset)
                with torch.no_grad():
                    weights = next(trainer.algorithm.student.parameters())
                    features = torch.from_numpy(np.asarray(found.images[asked]))
                    answer = trainer.algorithm.network()(features.to(weights.device, weights.dtype))
                logits[fold == number] = answer.float().cpu().numpy()
            finally:
                trainer.close()
    return logits


def fold_of(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """The fold, int64 [N], of each label: as equal as can be, in all and in every class."""
    tickets = np.random.Philox(key=seed).random_raw(len(labels))
    fold = np.empty(len(labels), np.int64)
    fold[np.lexsort((tickets, labels))] = np.arange(len(labels)) % folds
    return fold


def _without(config: Config, lists: Path) -> Config:
    """The configuration of one fold."""
    data = {"split_file": lists, "split_seed": None, "allow_empty_classes": True}
    changes = {
        "data": config.data.model_copy(update=data),
        "evaluate": config.evaluate.model_copy(update={"shares_images": 0}),
        "log": config.log.model_copy(update={"progress": "off"}),
    }
    return config.model_copy(update=changes)
