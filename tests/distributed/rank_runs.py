"""Training on some ranks, for tests: module-level functions that `run_ranks` can send to them."""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from collections.abc import Callable
from typing import Any

import torch

from simpro_fast.config import Config, parse_config
from simpro_fast.data.batch import Batch, Loader, LoaderSettings
from simpro_fast.data.loader import build_loader
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.training.metrics import kl_of_estimate
from simpro_fast.training.trainer import Trainer
from tests.distributed.gloo_ranks import run_ranks
from tests.equality import by_part


def start(config: Config, rank: int, world_size: int) -> Ranks:
    if world_size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    return start_ranks(config)


class HalfBrighter:
    """A loader whose second half of every global batch is brighter by 60 of 255.

    So the ranks' data differ, and one rank sees the same images.
    """

    def __init__(self, settings: LoaderSettings, dataset: Any, split: Any) -> None:
        self._loader: Loader = build_loader(settings, dataset, split)
        self._rank, self._world_size = settings.rank, settings.world_size
        self._views = (settings.labeled_views, 1 + settings.strong_views)
        self._offset = 60 / 255 / torch.tensor(dataset.std).view(1, 3, 1, 1)

    def next(self, step: int) -> Batch:
        batch = self._loader.next(step)
        bright = []
        for images, views in zip((batch.targets, batch.truth), self._views, strict=True):
            position = self._rank * len(images) + torch.arange(len(images))
            bright += [position >= self._world_size * len(images) / 2] * views
        views = batch.views + torch.cat(bright).view(-1, 1, 1, 1) * self._offset
        return dataclasses.replace(batch, views=views)

    def close(self) -> None:
        self._loader.close()


def train(
    rank: int,
    world_size: int,
    tree: dict[str, Any],
    steps: int,
    make_loader: Callable[..., Loader] = build_loader,
    write: bool = False,
) -> dict[str, Any]:
    """Losses and priors after each of `steps` steps, and the state at the end.

    `equal` says whether weights, average, buffers and priors were equal on all ranks bit for bit
    at the end, the priors after every step.
    """
    config = parse_config(tree)
    ranks = start(config, rank, world_size)
    trainer = Trainer(config, ranks, make_loader=make_loader, write=write)
    losses: list[list[float]] = []
    trainer.algorithm.method.register_forward_hook(
        lambda _, __, out: losses[-1].append(out.loss.item())
    )
    priors, kl = [], []
    begun = trainer.step
    for _ in range(steps):
        losses.append([])
        trainer.train_step()
        if trainer.step % config.train.period == 0:
            trainer._end_period()
            trainer._finish_period()
        method = trainer.algorithm.method
        counts = ranks.sum(torch.stack([method.labeled_count, method.unlabeled_mass]))
        priors.append(torch.cat([method.pi_u[None], method.phi[None], counts]))
        known = kl_of_estimate(method, trainer.setup.split)
        kl.append(math.nan if known is None else known)
    trainer.save()
    state = by_part(trainer.checkpoints.state_dict(trainer.state))
    trainer.close()
    shared = [*state["model"].values(), *state["average"].values(), *priors]
    checksum = 0
    for tensor in shared if world_size > 1 else ():
        checksum = zlib.crc32(tensor.contiguous().numpy(), checksum)
    everywhere = ranks.gather(torch.tensor([checksum]))
    means = [sum(parts) / len(parts) for parts in losses]
    return {
        "start": begun,
        "losses": torch.tensor(means, dtype=torch.float64),
        "priors": torch.stack(priors) if priors else torch.empty(0),
        "kl": torch.tensor(kl, dtype=torch.float64),
        "equal": bool((everywhere == everywhere[0]).all()),
        **state,
    }


def curves(rank: int, world_size: int, *args: Any) -> dict[str, Any]:
    """What `train` gives but the state, which is large for real nets."""
    result = train(rank, world_size, *args)
    return {key: result[key] for key in ("losses", "priors", "kl", "equal")}


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function` on shared ranks, or in this process for a single one; results by rank."""
    if world_size == 1:
        return [function(0, 1, *args)]
    return run_ranks(function, *args, world_size=world_size)


def mean_losses(results: list[dict[str, Any]]) -> torch.Tensor:
    """Loss of the global batch at each step, float64 [steps]."""
    return torch.stack([result["losses"] for result in results]).mean(0)


def dump(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")
