"""Averages over a period, kept on the device so that no step waits for them."""

from __future__ import annotations

import logging
import resource
import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from simpro_fast.answers.evaluation import kl_divergence
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.methods import Method, MethodOutput
from simpro_fast.training.setup import Setup
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)

_SUMS = ("loss", "loss_labeled", "loss_unlabeled", "mask_rate")


class Meter:
    """Sums of one period: losses, mask rate, agreement of kept pseudo-labels with the truth.

    The truth serves this diagnostic only; training never sees it.
    """

    def __init__(self, device: torch.device, num_classes: int) -> None:
        # four sums of _SUMS, kept rows with known truth, of these the right ones, steps
        self.sums = torch.zeros(len(_SUMS) + 3, dtype=torch.float64, device=device)
        # per pseudo-label: all rows, kept ones, of these those with known truth, the right ones
        self.class_sums = torch.zeros(4 * num_classes, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, out: MethodOutput, truth: Tensor) -> None:
        known = out.mask & (truth >= 0)
        right = known & (out.pseudo_labels == truth)
        values = [getattr(out, name) for name in _SUMS]
        values += [known.sum(), right.sum()]
        self.sums += torch.stack([v.to(torch.float64) for v in values] + [self.sums.new_ones(())])
        rows = torch.stack([torch.ones_like(known), out.mask, known, right])
        self.class_sums.view(len(rows), -1).index_add_(1, out.pseudo_labels, rows.double())

    def finish(self, ranks: Ranks) -> dict[str, Any]:
        """Averages over all ranks and steps since the last call; clears the sums.

        `mask_rate_per_class` is the share (0 to 1) of the images with each pseudo-label that passes
        the threshold, `pseudo_label_accuracy_per_class` the percentage of those kept whose
        pseudo-label is right, their precision; both [K], None for a class without such images.
        """
        *sums, known, right, steps = ranks.sum(self.sums.clone()).tolist()
        rows = ranks.sum(self.class_sums.clone()).view(4, -1).tolist()
        self.sums.zero_()
        self.class_sums.zero_()
        averages: dict[str, Any] = {
            name: value / steps if steps else None for name, value in zip(_SUMS, sums, strict=True)
        }
        averages["pseudo_label_accuracy"] = 100.0 * right / known if known else None
        averages["mask_rate_per_class"] = _ratios(rows[1], rows[0], 1.0)
        averages["pseudo_label_accuracy_per_class"] = _ratios(rows[3], rows[2], 100.0)
        return averages


def _ratios(parts: list[float], wholes: list[float], scale: float) -> list[float | None]:
    pairs = zip(parts, wholes, strict=True)
    return [scale * part / whole if whole else None for part, whole in pairs]


class ThresholdWatch:
    """Says when for many periods no unlabeled image has passed the threshold.

    Args:
        threshold: `method.threshold`; above 1 it masks everything on purpose.
    """

    PATIENCE = 5
    """Periods without any; then a warning at every doubling."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._empty, self._next = 0, self.PATIENCE

    def period(self, kept: float | None) -> None:
        """A period has ended, in which this share of the unlabeled images passed; None: no step."""
        if kept != 0.0 or self._threshold > 1:
            self._empty, self._next = 0, self.PATIENCE
            return
        self._empty += 1
        if self._empty == self._next:
            self._next *= 2
            logger.warning(
                "for %d periods no unlabeled image has passed method.threshold=%g, so only the "
                "labeled ones are learned from; a lower threshold or a smaller method.tau helps",
                self._empty,
                self._threshold,
                extra=FOUND_BY_ALL,
            )


@dataclass
class Stopwatch:
    """Wall time of training steps, and the share of it spent waiting for data."""

    steps: int = 0
    training: float = 0.0
    waiting: float = 0.0
    _started: float = field(default=0.0, repr=False)

    def start(self) -> None:
        self._started = time.perf_counter()

    def data_arrived(self) -> None:
        self.waiting += time.perf_counter() - self._started

    def stop(self) -> None:
        self.training += time.perf_counter() - self._started
        self.steps += 1

    def views_per_second(self, views_per_step: int) -> float:
        return self.steps * views_per_step / self.training if self.training else 0.0

    def wait_fraction(self) -> float:
        return self.waiting / self.training if self.training else 0.0


def period_row(
    setup: Setup, method: Method, step: int, lr: float, draws: list[int], stopwatch: Stopwatch
) -> dict[str, Any]:
    """What metrics.jsonl says of the period that ends with `step`, before its evaluation."""
    return {
        "step": step,
        "period": -(-step // setup.config.train.period),
        "lr": lr,
        "labeled_draws": draws,
        "pi_u": method.normalised_pi_u().tolist(),
        "phi": method.phi.tolist(),
        "kl_pi_u": kl_of_estimate(method, setup.split),
        "top1": None,
        "top1_class_mean": None,
        "per_class": None,
        "images_per_second": stopwatch.views_per_second(setup.views_per_step),
        "data_wait_fraction": stopwatch.wait_fraction(),
        "peak_memory_mib": peak_memory_mib(setup.ranks.device),
    }


def kl_of_estimate(method: Method, split: Split) -> float | None:
    """KL(true unlabeled distribution || estimate) in nats; None where the truth is unknown."""
    counts = split.unlabeled_counts
    return None if counts is None else kl_divergence(counts, method.normalised_pi_u())


def peak_memory_mib(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def step_profiler(trace: Path | None) -> AbstractContextManager[Any]:
    """torch's profiler over four steps after four others, written to `trace`; None: nothing."""
    if trace is None:
        return nullcontext()

    def write(profile: Any) -> None:
        with TemporaryDirectory() as folder, replacing(trace) as file:
            profile.export_chrome_trace(f"{folder}/trace.json")
            with open(f"{folder}/trace.json", "rb") as made:
                shutil.copyfileobj(made, file)

    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=2, active=4, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    )
