"""Phases of a method: the course of the learning rate, and what a new phase changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from simpro_fast.answers.evaluation import network_logits, share_of
from simpro_fast.config import Config
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.splits.split import PseudoLabeled, Split
from simpro_fast.methods import Change, Method
from simpro_fast.methods.needs import Kind
from simpro_fast.models import head_of
from simpro_fast.training.engine.compile import compile_method
from simpro_fast.training.setup import Setup, build_student
from simpro_fast.training.step import Step


def rate_course(config: Config, method: Method, step: int) -> tuple[int, int]:
    """Step within the current learning-rate schedule, and the length of that schedule."""
    period, total = config.train.period, config.train.steps
    span = method.span_at(step // period)
    if span is None:
        return step, total
    first, end = (period * bound for bound in span)
    return step - first, (total if end + period > total else end) - first


def begin_phase(
    algorithm: Step,
    setup: Setup,
    split: Split,
    phase: int,
    step: int,
    between: Callable[[], None],
) -> Split:
    """Do what the method does and asks for before the first step of a new phase.

    Args:
        split: as it has been so far.
        between: called before every batch of images that the method looks at; may raise.

    Returns:
        the split from here on; another one where unlabeled images have joined the labeled ones.
    """
    method = algorithm.method
    method.phase = phase
    compile_method(method, setup.config)
    tools = PhaseNetwork(algorithm, setup, split, between)
    change = method.enter_phase(phase, tools) or Change()
    if change.fresh_network:
        fresh, _ = build_student(setup, fresh=True)
        # The method's own parameters, which a fresh network has not, stay as they are.
        weights = {**algorithm.student.state_dict(), **fresh.state_dict()}
        algorithm.engine.load({"model": weights, "optimizer": {}})
        algorithm.average.load_state_dict(weights)
    if change.pseudo_labeled is None:
        return split
    positions, labels = (tensor.cpu().numpy() for tensor in change.pseudo_labeled)
    return split.with_pseudo_labeled(PseudoLabeled(positions, labels, step))


class PhaseNetwork:
    """The network as it is at the end of a phase; implements `PhaseTools`."""

    def __init__(
        self, algorithm: Step, setup: Setup, split: Split, between: Callable[[], None]
    ) -> None:
        self.network: nn.Module = algorithm.average.module
        self._predicting = algorithm.network()
        self._setup, self._split, self._between = setup, split, between

    def logits(self, kind: Kind) -> Tensor:
        return self._run(kind)[1]

    def features(self, kind: Kind) -> Tensor:
        return self._run(kind)[0]

    def labels(self) -> Tensor:
        return torch.from_numpy(self._split.targets(self._setup.dataset))

    def _run(self, kind: Kind) -> tuple[Tensor, Tensor]:
        """Features and logits of one list, this rank's share computed and the others' gathered."""
        dataset, network, ranks = self._setup.dataset, self._predicting, self._setup.ranks
        images, rows = (
            (dataset.images, self._split.own_labeled)
            if kind == "labeled"
            else (dataset.unlabeled_pool, self._split.unlabeled)
        )
        seen: list[Tensor] = []
        hook = head_of(network).register_forward_pre_hook(lambda _, x: seen.append(x[0].float()))
        outputs = network_logits(
            network,
            select(images, rows),
            mean=dataset.mean,
            std=dataset.std,
            device=ranks.device,
            batch_size=self._setup.config.evaluate.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            between=self._between,
        )
        try:
            logits = [part.float() for _, part in outputs]
        finally:
            hook.remove()
        return self._all(seen, len(rows)), self._all(logits, len(rows))

    def _all(self, parts: list[Tensor], count: int) -> Tensor:
        """Rows [count, n] of all ranks, on the CPU."""
        ranks = self._setup.ranks
        shares = [share_of(count, rank, ranks.world_size) for rank in range(ranks.world_size)]
        sizes = [end - start for start, end in shares]
        mine = torch.cat(parts)
        padded = mine.new_zeros(max(sizes), mine.shape[1])
        padded[: len(mine)] = mine
        gathered = ranks.gather(padded.flatten()).view(ranks.world_size, *padded.shape).cpu()
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
