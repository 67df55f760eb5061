"""Pictures for the report: views exactly as the network sees them, and confident mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
from simpro_kernels.augment.operations import Operation

from simpro_fast.answers.evaluation import Evaluation
from simpro_fast.answers.report.pictures import Mistakes, TrainingViews
from simpro_fast.data.batch import Batch, BatchLayout
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.printable import printable

SHOWN = 8
# Operations that have no level to show.
LEVELLESS = (Operation.AUTO_CONTRAST, Operation.EQUALIZE)


def views_figure(
    batch: Batch, draws: dict[str, Any], layout: BatchLayout, dataset: ArrayDataset
) -> TrainingViews:
    """The first unlabeled images of a batch with their views, normalisation undone.

    Args:
        batch: a step's views. draws: what `Loader.describe` says of the same step.
    """
    unlabeled, strong_views = layout.unlabeled, layout.strong_views
    count = min(SHOWN, unlabeled)
    views = batch.views[layout.rows_by_kind[0] :].permute(0, 2, 3, 1).float().cpu().numpy()
    pixels = np.clip(np.rint((views * dataset.std + dataset.mean) * 255), 0, 255).astype(np.uint8)
    weak, *strong = np.split(pixels, 1 + strong_views)
    dataset_rows = np.asarray(draws["unlabeled"][:count])
    truth = dataset.unlabeled_truth(dataset_rows)
    return TrainingViews(
        original=dataset.unlabeled_pool[dataset_rows],
        weak=weak[:count],
        strong=np.stack([view[:count] for view in strong], axis=1),
        titles=[printable(dataset.class_names[k]) if k >= 0 else "unlabeled" for k in truth],
        captions=[
            [
                _caption(draws["unlabeled_views"], (1 + v) * unlabeled + i)
                for v in range(strong_views)
            ]
            for i in range(count)
        ],
    )


def confident_mistakes(evaluation: Evaluation, dataset: ArrayDataset, split: Split) -> Mistakes:
    """The pictures of `evaluation.mistakes` of the test images of the split; maybe none."""
    images, _ = dataset.test_part
    found = np.zeros((4, 0)) if evaluation.mistakes is None else evaluation.mistakes.numpy()
    places, labels, predicted = found[1:].astype(np.int64)
    return Mistakes(np.asarray(images[split.test[places]]), labels, predicted, found[0])


def _caption(draws: dict[str, list[Any]], row: int) -> str:
    """The operations whose coin came up, in order, with their levels."""
    done = [
        Operation(operation).name.lower() + ("" if operation in LEVELLESS else f" {level}")
        for operation, level, applied in zip(
            draws["operation"][row], draws["level"][row], draws["apply"][row], strict=True
        )
        if applied and operation != Operation.IDENTITY
    ]
    return ", ".join(done) or "cutout only"
