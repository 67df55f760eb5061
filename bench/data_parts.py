"""Where the processor time of a step's views goes, and what a plain thread would take.

    python bench/data_parts.py
    python bench/data_parts.py --smoke      # one repetition, nothing kept

The batches of the digits, Fashion-MNIST and CIFAR recipes with made-up images, on one thread.
`draws` to `policy` are the parts of making a step's views uint8, the lower quartile over
repetitions. `pipeline` is the whole loader with the DALI graph (handing over, normalising, working
ahead); `plain thread` is the same loader with a Python thread and a queue in its place, which
normalises with torch; both in turns, `ratio` is that of the plain thread to the pipeline, medians
of the rounds. Their first batches are compared bit by bit before. Milliseconds of processor time,
which a busy neighbour disturbs less than the clock. Results: bench/results/data_parts.csv.
"""

from __future__ import annotations

import argparse
import functools
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_data import ARRAYS
from common import RESULTS, machine, write_table
from simpro_kernels.augment.operations import POLICY
from simpro_kernels.augment.reference import apply_strong_policy, crop_flip
from torch import Tensor

from simpro_fast.config import Config, load_config
from simpro_fast.data.augment.views import view_plan
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline import array_loader
from simpro_fast.data.pipeline.array_loader import ArrayLoader
from simpro_fast.data.sampling.draws import StepDraws
from simpro_fast.data.splits.build import make_split

RECIPES = {"digits": (16, 32), "fashion_mnist": (28, 32), "cifar": (32, 64)}
"""Image side and labeled images per step; mu is 8."""
SETTLE = 0.15
"""Seconds in which a loader makes the steps that it is ahead."""


def configured(recipe: str) -> Config:
    side, batch = RECIPES[recipe]
    sizes = (f"data.image_size={side}", f"data.batch_size={batch}", "data.mu=8")
    return load_config("cifar10_lt/consistent", [*ARRAYS, *sizes])


def loader(config: Config) -> ArrayLoader:
    dataset = load_dataset(config.data)
    made = build_loader(
        config.data,
        dataset,
        make_split(config.data, dataset, config.seed),
        labeled_views=config.labeled_views,
        strong_views=config.strong_views,
        seed=1,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        start_step=0,
        num_threads=1,
    )
    assert isinstance(made, ArrayLoader)
    return made


def thread_ms(function: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.thread_time()
        function()
        times.append(1e3 * (time.thread_time() - started))
    return sorted(times)[len(times) // 4]


def parts(recipe: str, repetitions: int) -> dict[str, float]:
    made = loader(configured(recipe))
    layout, augment, resident = made._layout, made._augment, made._resident
    draws: StepDraws = made._draws(0)
    assert resident is not None

    rows = np.arange(layout.labeled + layout.unlabeled)

    def plans() -> Any:
        labeled = view_plan(draws.labeled_views, rows[: layout.labeled], augment)
        unlabeled = view_plan(draws.unlabeled_views, rows[layout.labeled :], augment)
        return np.concatenate([labeled, unlabeled])

    plan = plans()
    images, _ = resident.gather(draws.labeled_positions, draws.unlabeled_positions)
    weak = crop_flip(images, plan, max_shift=augment.max_shift)
    functions: dict[str, Callable[[], Any]] = {
        "draws": lambda: made._draws(0),
        "tables": plans,
        "gather": lambda: resident.gather(draws.labeled_positions, draws.unlabeled_positions),
        "weak": lambda: crop_flip(images, plan, max_shift=augment.max_shift),
        "policy": lambda: apply_strong_policy(weak, plan[:, POLICY]),
    }
    times = {name: thread_ms(function, repetitions) for name, function in functions.items()}
    made.close()
    return times


class PlainThread:
    """What `build_pipeline` gives, from a Python thread and a queue instead of DALI."""

    def __init__(self, make_views: Callable[[], list[Tensor]], **options: Any) -> None:
        augment, prefetch = options["augment"], options["prefetch"]
        pixels = augment.image_size**2
        # As long as an image: torch is four times as fast as with three values to broadcast.
        self._mean = 255 * torch.tensor(augment.mean).repeat(pixels)
        self._scale = 1 / (255 * torch.tensor(augment.std)).repeat(pixels)
        self._ahead, self._ready = threading.Semaphore(prefetch), queue.SimpleQueue[Tensor]()
        work = functools.partial(self._work, make_views, options["steps"])
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def _work(self, make_views: Callable[[], list[Tensor]], steps: int) -> None:
        torch.set_num_threads(1)
        for _ in range(steps):
            self._ahead.acquire()
            (views,) = make_views()
            rows = views.flatten(1).float().sub_(self._mean).mul_(self._scale)
            self._ready.put(rows.view(1, *views.shape))

    def run(self) -> tuple[PlainThread]:
        return (self,)

    def as_tensor(self) -> Tensor:
        self._ahead.release()
        return self._ready.get()


def compare(recipe: str, rounds: int, steps: int) -> dict[str, float]:
    """Processor time per step of the loader with either, and the median ratio of the pairs."""
    plain = functools.partial(PlainThread, steps=3 + (rounds + 1) * steps)  # two ahead
    with mock.patch.object(array_loader, "build_pipeline", plain):
        loaders = {"plain thread": loader(configured(recipe))}
    loaders["pipeline"] = loader(configured(recipe))
    first, second = (made.next(0).views for made in loaders.values())
    assert torch.equal(first, second)
    times: dict[str, list[float]] = {kind: [] for kind in loaders}
    for round_ in range(rounds + 1):  # the first is the warm-up
        for kind in sorted(loaders, reverse=round_ % 2 == 1):
            started = time.process_time()
            for step in range(steps):
                loaders[kind].next(1 + round_ * steps + step)
            time.sleep(SETTLE)  # what is made ahead belongs to this round
            times[kind].append(1e3 * (time.process_time() - started) / steps)
    loaders["plain thread"]._pipe.thread.join()
    for made in loaders.values():
        made.close()
    pairs = zip(times["plain thread"][1:], times["pipeline"][1:], strict=True)
    found = {kind: statistics.median(of[1:]) for kind, of in times.items()}
    return found | {"ratio": statistics.median(a / b for a, b in pairs)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Processor time of the parts of a step's views.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--smoke", action="store_true", help="one repetition, nothing kept")
    options = parser.parse_args()
    rounds, steps, repetitions = (1, 4, 1) if options.smoke else (options.rounds, options.steps, 40)
    torch.set_num_threads(1)
    print("  ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    rows = []
    for recipe in RECIPES:
        times = parts(recipe, repetitions)
        times |= compare(recipe, rounds, steps)
        rows += [
            {"recipe": recipe, "part": name, "cpu_ms": round(value, 2)}
            for name, value in times.items()
        ]
        shown = "  ".join(f"{name} {value:.2f}" for name, value in times.items())
        print(f"{recipe:14}{shown}", flush=True)
    if not options.smoke:
        write_table(RESULTS / "data_parts.csv", rows, replace=("recipe", "part"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
