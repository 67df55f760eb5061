"""Where the processor time of a step's views goes, and what several steps per fetch save.

    python bench/data_parts.py
    python bench/data_parts.py --smoke      # one repetition, nothing kept

The batches of the digits, Fashion-MNIST and CIFAR recipes with made-up images, on one thread.
`draws` to `policy` are the parts of making a step's views uint8, the lower quartile over
repetitions; `step` is the whole loader with the pipeline (handing over, normalising) per step, with
1, 2 and 4 steps per fetch, the median of rounds in turns. Milliseconds of processor time, which a
busy neighbour disturbs less than the clock. Results: bench/results/data_parts.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_data import ARRAYS
from common import RESULTS, machine, write_table
from simpro_kernels.augment.operations import POLICY
from simpro_kernels.augment.reference import apply_strong_policy, crop_flip

from simpro_fast.config import Config, load_config
from simpro_fast.data.augment.views import view_plan
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline.array_loader import ArrayLoader
from simpro_fast.data.sampling.draws import StepDraws
from simpro_fast.data.splits.build import make_split

RECIPES = {"digits": (16, 32), "fashion_mnist": (28, 32), "cifar": (32, 64)}
"""Image side and labeled images per step; mu is 8."""
FETCHES = (1, 2, 4)


def configured(recipe: str, steps_per_fetch: int) -> Config:
    side, batch = RECIPES[recipe]
    sizes = (f"data.image_size={side}", f"data.batch_size={batch}", "data.mu=8")
    fetch = f"data.steps_per_fetch={steps_per_fetch}"
    return load_config("cifar10_lt/consistent", [*ARRAYS, *sizes, fetch])


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
    made = loader(configured(recipe, 1))
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


def step_ms(recipe: str, steps_per_fetch: int, steps: int) -> float:
    made = loader(configured(recipe, steps_per_fetch))
    warm_up = 2 * steps_per_fetch
    for step in range(warm_up):
        made.next(step)
    started = time.process_time()
    for step in range(warm_up, warm_up + steps):
        made.next(step)
    elapsed = time.process_time() - started
    made.close()
    return 1e3 * elapsed / steps


def main() -> int:
    parser = argparse.ArgumentParser(description="Processor time of the parts of a step's views.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a round, a multiple of 4")
    parser.add_argument("--smoke", action="store_true", help="one repetition, nothing kept")
    options = parser.parse_args()
    rounds, steps, repetitions = (1, 4, 1) if options.smoke else (options.rounds, options.steps, 40)
    torch.set_num_threads(1)
    print("  ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    rows = []
    for recipe in RECIPES:
        times = parts(recipe, repetitions)
        whole: dict[int, list[float]] = {fetch: [] for fetch in FETCHES}
        for _ in range(rounds):
            for fetch in FETCHES:
                whole[fetch].append(step_ms(recipe, fetch, steps))
        times |= {f"step, {fetch} per fetch": statistics.median(whole[fetch]) for fetch in FETCHES}
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
