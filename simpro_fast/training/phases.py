"""Phases of a method: when they begin, and what they use and change of a run."""

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
from simpro_fast.engine.base import Engine
from simpro_fast.evaluation import network_input
from simpro_fast.methods import Change, Method, Needs
from simpro_fast.methods.needs import Kind
from simpro_fast.models import ModelEMA, head_of
from simpro_fast.training.build import build_student
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
        self.split, self._own, self.since = split, split, 0
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
        """Restore; None: no image has joined.

        Raises:
            ValueError, LookupError: positions or labels of other lists.
        """
        self.split, self._joined, self.since = self._own, None, 0
        if state is not None:
            labels, classes = state["labels"], self._dataset.num_classes
            if ((labels < 0) | (labels >= classes)).any():
                raise ValueError(f"pseudo-labels that are none of the {classes} classes")
            self.join(state["since"], state["positions"], labels)

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
        dtype = next(network.parameters()).dtype
        chosen, (start, end) = select(images, rows), _share(len(rows), ranks.rank, ranks.world_size)
        logits: list[Tensor] = []
        try:
            for first in range(start, end, self._batch_size):
                pixels = chosen[slice(first, min(first + self._batch_size, end))]
                views = network_input(
                    torch.as_tensor(pixels).to(ranks.device), dataset.mean, dataset.std, dtype
                )
                logits.append(network(views).float())
        finally:
            hook.remove()
            network.train(was_training)
        return self._all(seen, len(rows)), self._all(logits, len(rows))

    def _all(self, parts: list[Tensor], count: int) -> Tensor:
        """Rows [count, n] of all ranks, on the CPU."""
        ranks = self._ranks
        shares = [_share(count, rank, ranks.world_size) for rank in range(ranks.world_size)]
        sizes = [end - start for start, end in shares]
        mine = torch.cat(parts)
        padded = mine.new_zeros(max(sizes), mine.shape[1])
        padded[: len(mine)] = mine
        gathered = ranks.gather(padded.flatten()).view(ranks.world_size, *padded.shape).cpu()
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _share(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """First image of a rank's share of so many, and the one after its last."""
    return count * rank // world_size, count * (rank + 1) // world_size


class Phases:
    """Follows `Method.phase_at` and does what a new phase asks for."""

    def __init__(
        self,
        config: Config,
        dataset: ArrayDataset,
        ranks: Ranks,
        needs: Needs,
        method: Method,
        engine: Engine,
        ema: ModelEMA,
        predictor: Predictor,
        labeled: Labeled,
    ) -> None:
        self._config, self._dataset, self._ranks, self._needs = config, dataset, ranks, needs
        self._method, self._engine, self._ema = method, engine, ema
        self._predictor, self._labeled = predictor, labeled

    def course(self, step: int) -> tuple[int, int]:
        """Steps since the learning rate started anew, and of how many; without spans: step, all."""
        period, total = self._config.train.period, self._config.train.steps
        span = self._method.span_at(step // period)
        if span is None:
            return step, total
        first, end = (period * bound for bound in span)
        return step - first, (total if end + period > total else end) - first

    def due(self, step: int) -> int | None:
        """The phase that begins with this step; None where the last one goes on."""
        phase = self._method.phase_at(step // self._config.train.period)
        return None if phase == self._method.phase else phase

    def enter(self, phase: int, step: int) -> bool:
        """Begin a phase; whether there are other labeled images now, which need another loader."""
        self._method.phase = phase
        tools = TrainedNetwork(
            *(self._predictor, self._ema.module, self._dataset, self._labeled.split, self._ranks),
            batch_size=self._config.evaluate.batch_size,
        )
        change = self._method.enter_phase(phase, tools) or Change()
        if change.fresh_network:
            config, dataset, ranks = self._config, self._dataset, self._ranks
            fresh, _ = build_student(config, dataset, ranks, self._needs, fresh=True)
            weights = fresh.state_dict()
            self._engine.load({"model": weights, "optimizer": {}})
            self._ema.load_state_dict(weights)
        if change.pseudo_labeled is None:
            return False
        self._labeled.join(step, *change.pseudo_labeled)
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the phase that has begun, and the images that joined."""
        return {"phase": self._method.phase, "pseudo_labeled": self._labeled.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore; a checkpoint of before there were phases has neither."""
        phase = state.get("phase", 0)
        if not isinstance(phase, int):
            raise TypeError(f"the phase is a {type(phase).__name__}")
        self._method.phase = phase
        self._labeled.load(state.get("pseudo_labeled"))
