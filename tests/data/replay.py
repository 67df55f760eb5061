"""A step's views from its recorded draws, without a pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from simpro_kernels.augment.reference import make_views

from simpro_fast.data.augment.views import view_plan
from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.sampling.draws import AugmentParams


def replay_views(
    description: dict[str, Any],
    images: np.ndarray,
    unlabeled_pool: np.ndarray,
    augment: AugmentConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the views of `Loader.describe` again, from the arrays of the data set.

    Returns:
        labeled uint8 [L, b, H, W, 3] and unlabeled uint8 [1+V, m, H, W, 3]; view 0 is the weak
        one. They are what the pipeline had before it normalised.
    """
    labeled, unlabeled = (
        _replay(
            pool[np.asarray(description[kind])],
            AugmentParams.from_lists(description[f"{kind}_views"]),
            augment,
        )
        for kind, pool in (("labeled", images), ("unlabeled", unlabeled_pool))
    )
    return labeled, unlabeled


def _replay(images: np.ndarray, draws: AugmentParams, augment: AugmentConfig) -> np.ndarray:
    plan = view_plan(draws, np.arange(len(images)), augment)
    made = make_views(torch.from_numpy(images), plan, max_shift=augment.max_shift).numpy()
    return made.reshape(-1, *images.shape)
