"""Log lines before the first step of a run."""

from __future__ import annotations

import logging

import torch

from simpro_fast.config import Config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models import PretrainedReport

logger = logging.getLogger(__name__)


def announce_launch(config: Config, ranks: Ranks) -> None:
    """Hosts, ranks and what they share of a step: the first lines of every run of several ranks."""
    if not ranks.is_main or ranks.world_size == 1:
        return
    shown = ", ".join(f"{host} x{count}" for host, count in ranks.hosts[:16])
    more = f", and {len(ranks.hosts) - 16} more" if len(ranks.hosts) > 16 else ""
    logger.info("%d rank(s) on %d host(s): %s%s", ranks.world_size, len(ranks.hosts), shown, more)
    labeled, unlabeled = config.data.batch_size, config.data.batch_size * config.data.mu
    logger.info(
        "global batch %d labeled + %d unlabeled images per step; per rank %d + %d",
        labeled,
        unlabeled,
        labeled // ranks.world_size,
        unlabeled // ranks.world_size,
    )


def announce(
    config: Config,
    ranks: Ranks,
    split: Split,
    *,
    views_per_step: int,
    alpha: float,
    pretrained: PretrainedReport | None,
    dataset: ArrayDataset,
    normalised_by: str,
    interpolated_by: str,
) -> None:
    """Device, ranks, batches and split, on rank 0."""
    if not ranks.is_main:
        return
    labeled, unlabeled = config.data.batch_size, config.data.batch_size * config.data.mu
    if (prior := getattr(config.method, "prior", None)) is not None:
        logger.info("pi_u is given by method.prior=%s and stays as it is", prior)
    logger.info(
        "%s seed %d: %s (%s) on %s, %d rank(s), engine %s",
        config.name,
        config.seed,
        config.method.name,
        config.method.variant,
        ranks.device.type,
        ranks.world_size,
        config.distributed.engine,
    )
    logger.info(
        "per step, all ranks: %d labeled x %d view(s) + %d unlabeled x (1 weak + %d strong) = %d "
        "views; alpha %.4g; %d torch thread(s) per rank",
        labeled,
        config.labeled_views,
        unlabeled,
        config.strong_views,
        views_per_step,
        alpha,
        torch.get_num_threads(),
    )
    truth = "unknown" if split.unlabeled_counts is None else list(split.unlabeled_counts)
    overlap = "labeled images are" if split.overlap else "no labeled image is"
    logger.info("labeled   N=%d per class %s", len(split.labeled), list(split.labeled_counts))
    logger.info("unlabeled M=%d per class %s (%s in it)", len(split.unlabeled), truth, overlap)
    logger.info("test      %d images; split %s", len(split.test), split.hash()[:12])
    square = dataset.square
    logger.info(
        "squares   %d px, data.fit=%s, %s: %s",
        square.size,
        square.fit,
        square.interpolation,
        interpolated_by,
    )
    mean, std = (tuple(round(v, 4) for v in values) for values in (dataset.mean, dataset.std))
    logger.info("images    normalised by mean %s, std %s: %s", mean, std, normalised_by)
    if pretrained is not None:
        logger.info("weights   %s: %s", pretrained.file, pretrained)
    if not len(split.test):
        logger.warning("no test images: accuracy is not measured, top1 is null")
