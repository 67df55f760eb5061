"""What a new phase of a method can use and change: the trained network, the labeled images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpro_fast.config import Config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.sampling.labeled_order import LabeledDraws
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.evaluation import normalised, share
from simpro_fast.methods.needs import Kind
from simpro_fast.models import head_of
from simpro_fast.training.predictor import Predictor


class Labeled:
    """The labeled images that are trained on, and those that a method has labeled among them.

    Attributes:
        split: the split of the run, with pseudo-labeled images where there are some.
        since: step from which on it is as it is.
    """

    def __init__(self, config: Config, dataset: ArrayDataset, split: Split) -> None:
        self._config, self._dataset = config, dataset
        self._joined: tuple[Tensor, Tensor] | None = None
        self.split, self.since = split, 0
        self._draws = self._draws_of(split)

    def draws(self, first: int, stop: int) -> list[int]:
        """Labeled images drawn per class in the steps first..stop-1, under the present list."""
        return self._draws.counts(first, stop)

    def join(self, step: int, positions: Tensor, labels: Tensor) -> None:
        """From `step` on, the unlabeled images at int64 [P] positions are labeled ones too."""
        self._joined, self.since = (positions.cpu(), labels.cpu()), step
        self.split = self.split.with_pseudo_labeled(*(t.numpy() for t in self._joined))
        self._draws = self._draws_of(self.split)

    def state(self) -> dict[str, Any] | None:
        if self._joined is None:
            return None
        positions, labels = self._joined
        return {"since": self.since, "positions": positions, "labels": labels}

    def load(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.join(state["since"], state["positions"], state["labels"])

    def _draws_of(self, split: Split) -> LabeledDraws:
        labels, classes = split.targets(self._dataset), self._dataset.num_classes
        return LabeledDraws(self._config.data, labels, classes, self._config.seed)


class TrainedNetwork:
    """The network as it is at the end of a phase; implements `PhaseTools`."""

    def __init__(
        self,
        predictor: Predictor,
        average: nn.Module,
        dataset: ArrayDataset,
        split: Split,
        ranks: Ranks,
        *,
        batch_size: int,
    ) -> None:
        self.network = average
        self._predictor, self._dataset, self._split = predictor, dataset, split
        self._ranks, self._batch_size = ranks, batch_size

    def logits(self, kind: Kind) -> Tensor:
        return self._run(kind)[1]

    def features(self, kind: Kind) -> Tensor:
        return self._run(kind)[0]

    def labels(self) -> Tensor:
        return torch.from_numpy(self._split.targets(self._dataset))

    @torch.no_grad()
    def _run(self, kind: Kind) -> tuple[Tensor, Tensor]:
        """Features and logits of one list, this rank's share computed and the others' gathered."""
        dataset, network, ranks = self._dataset, self._predictor.network(), self._ranks
        own = len(self._split.labeled) - self._split.num_pseudo_labeled
        images, rows = (
            (dataset.images, self._split.labeled[:own])
            if kind == "labeled"
            else (dataset.unlabeled_pool, self._split.unlabeled)
        )
        seen: list[Tensor] = []
        hook = head_of(network).register_forward_pre_hook(lambda _, x: seen.append(x[0].float()))
        was_training = network.training
        network.eval()
        try:
            logits = [
                network(views).float()
                for _, views in normalised(
                    select(images, rows),
                    *share(len(rows), ranks.rank, ranks.world_size),
                    mean=dataset.mean,
                    std=dataset.std,
                    device=ranks.device,
                    dtype=next(network.parameters()).dtype,
                    batch_size=self._batch_size,
                )
            ]
        finally:
            hook.remove()
            network.train(was_training)
        return self._all(seen, len(rows)), self._all(logits, len(rows))

    def _all(self, parts: list[Tensor], count: int) -> Tensor:
        """Rows [count, n] of all ranks, on the CPU."""
        ranks = self._ranks
        shares = [share(count, rank, ranks.world_size) for rank in range(ranks.world_size)]
        sizes = [end - start for start, end in shares]
        mine = torch.cat(parts)
        padded = mine.new_zeros(max(sizes), mine.shape[1])
        padded[: len(mine)] = mine
        gathered = ranks.gather(padded.flatten()).view(ranks.world_size, *padded.shape).cpu()
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
