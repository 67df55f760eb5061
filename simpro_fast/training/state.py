"""What a run goes on from: named tensors, for any number of ranks and any engine.

step        int, steps trained
tensors     {name: tensor}, equal on all ranks: `model/...`, `average/...`, `method/...`,
            `optimizer/<slot>/<weight>`, `history/...`, `phase`, `pseudo_labeled/...`; without
            what a frozen backbone has from the file of initial weights
per_rank    {name: [ranks, n]}, counts since the last update of the priors
row         metrics of a period that has ended and is not evaluated yet, else {}
config      the resolved configuration
fingerprint digests of data, split, files and initial weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from simpro_fast.data.splits.split import PseudoLabeled, Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.metrics import Meter
from simpro_fast.training.step import Step
from simpro_fast.utils.errors import UserError

Tensors = dict[str, Tensor]


@dataclass
class RunState:
    """What moves while a run goes on, beside weights, priors and counts."""

    split: Split
    """As it is now, with unlabeled images that the method has labeled."""
    step: int = 0
    """Steps trained."""
    row: dict[str, Any] | None = None
    """Metrics of a period that has ended and is not evaluated yet."""
    top1: list[float] = field(default_factory=list)
    """Of every evaluation so far, percent; the last 20 make `top1_mean_last20`."""
    seconds: float = 0.0
    """Wall time of all processes that worked on this run."""


def run_tensors(algorithm: Step, state: RunState) -> Tensors:
    """All that must come back equal on every rank; every rank calls it."""
    saved, method = algorithm.engine.save(), algorithm.method
    counts = set(method.rank_counts)
    networks = {"model": saved["model"], "average": algorithm.average.state_dict()}
    found = {
        **{
            f"{part}/{name}": tensor
            for part, state_dict in networks.items()
            for name, tensor in state_dict.items()
            if name not in algorithm.frozen
        },
        **_named("method", {k: v for k, v in method.state_dict().items() if k not in counts}),
        "history/top1": torch.tensor(state.top1, dtype=torch.float64),
        "history/seconds": torch.tensor(state.seconds, dtype=torch.float64),
        "phase": torch.tensor(method.phase),
    }
    for weight, slots in saved["optimizer"].items():
        for slot, value in slots.items():
            found[f"optimizer/{slot}/{weight}"] = torch.as_tensor(value)
    if (joined := state.split.pseudo_labeled) is not None:
        found |= {
            "pseudo_labeled/positions": torch.from_numpy(joined.positions),
            "pseudo_labeled/labels": torch.from_numpy(joined.labels),
            "pseudo_labeled/since": torch.tensor(joined.since),
        }
    return found


def load_run_tensors(
    tensors: Mapping[str, Tensor], algorithm: Step, state: RunState, split: Split
) -> None:
    """Put back what `run_tensors` gave.

    Args:
        split: of the run as the configuration makes it.

    Raises:
        UserError: a weight is not finite, or it is of another network; other misfits raise
            AttributeError, LookupError, RuntimeError, TypeError or ValueError.
    """
    if part := non_finite_part(tensors):
        raise UserError(f"a weight of the {part} is not finite")
    method = algorithm.method
    slots: dict[str, dict[str, Tensor]] = {}
    for name, value in _under("optimizer", tensors):
        slot, _, weight = name.partition("/")
        slots.setdefault(weight, {})[slot] = value
    own = algorithm.student.state_dict()
    frozen = {name: own[name] for name in algorithm.frozen}
    model, average = ({**frozen, **dict(_under(part, tensors))} for part in ("model", "average"))
    algorithm.engine.load({"model": model, "optimizer": slots})
    algorithm.average.load_state_dict(average)
    counts = {name: getattr(method, name) for name in method.rank_counts}
    method.load_state_dict({**counts, **dict(_under("method", tensors))})
    method.phase = int(tensors["phase"])
    state.top1 = tensors["history/top1"].tolist()
    state.seconds = float(tensors["history/seconds"])
    state.split = split
    if "pseudo_labeled/since" not in tensors:
        return
    positions, labels, since = (
        tensors[f"pseudo_labeled/{name}"].numpy() for name in ("positions", "labels", "since")
    )
    state.split = split.with_pseudo_labeled(PseudoLabeled(positions, labels, int(since)))


def rank_counts(algorithm: Step, meter: Meter) -> Tensors:
    """What this rank alone has counted since the last update of the priors, float64."""
    method = algorithm.method
    return {
        **{f"method/{name}": getattr(method, name) for name in method.rank_counts},
        "meter/sums": meter.sums,
        "meter/class_sums": meter.class_sums,
    }


def gather_counts(counts: Tensors, ranks: Ranks) -> Tensors:
    """Counts of all ranks by name, each [world_size, n]; every rank calls it."""
    rows = ranks.gather(torch.cat([count.flatten() for count in counts.values()]))
    parts = rows.split([count.numel() for count in counts.values()], dim=1)
    return {name: part.clone() for name, part in zip(counts, parts, strict=True)}


def scatter_counts(saved: Mapping[str, Tensor], counts: Tensors, ranks: Ranks) -> None:
    """Restore what `gather_counts` returned, from any number of ranks.

    Each rank goes on with its own counts; among another number of ranks, rank 0 with all.

    Raises:
        ValueError: they are others, or of other sizes.
    """
    if saved.keys() != counts.keys():
        raise ValueError(f"counts {sorted(saved)} in place of {sorted(counts)}")
    for name, target in counts.items():
        rows = saved[name].to(ranks.device)
        if rows.dim() != 2 or rows.shape[1] != target.numel():
            raise ValueError(f"{name} is {list(rows.shape)}, expected [ranks, {target.numel()}]")
        mine = rows[ranks.rank] if len(rows) == ranks.world_size else rows.sum(0) * ranks.is_main
        target.copy_(mine.view_as(target))


def non_finite_part(tensors: Mapping[str, Tensor]) -> str | None:
    """`model` or `average`, where a weight of it is NaN or infinite."""
    for part in ("model", "average"):
        floating = [t for _, t in _under(part, tensors) if t.is_floating_point()]
        norms = torch.stack(torch._foreach_norm(floating, torch.inf))
        if not bool(torch.isfinite(norms).all()):
            return part
    return None


def refuse_non_finite(tensors: Mapping[str, Tensor], step: int) -> None:
    """Keep a checkpoint clean: an overflow of the gradient can spoil weights under a finite loss.

    Raises:
        UserError: a weight or an averaged one is NaN or infinite.
    """
    if part := non_finite_part(tensors):
        raise UserError(
            f"after step {step} a weight of the {part} is not finite; nothing was saved, earlier "
            "checkpoints are kept. Lower optim.lr or set optim.grad_clip"
        )


def _named(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for name, tensor in tensors.items()}


def _under(part: str, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors of one part, without its prefix."""
    start = f"{part}/"
    return ((k[len(start) :], v) for k, v in tensors.items() if k.startswith(start))
