"""Views per second of the data pipeline and of others, side by side.

    python bench/bench_data.py                      # both workloads, some minutes
    python bench/bench_data.py --work arrays --side ours,pillow --rounds 9
    python bench/bench_data.py --smoke              # a check in seconds, nothing kept

Every side makes a step's views, one weak and one strong of each labeled image, one weak and two
strong of each unlabeled one, as normalised float32 in channels_last. `arrays` is the batch of the
CIFAR recipe, 32 x 32 pixels in memory; `jpeg` reads files of 500 x 375 for views of 224 x 224.
Sides, each with `--threads` threads or worker processes: ours; `pillow`, the same policy image by
image; `dali_stock`, DALI with its own RandAugment; torchvision v2 on tensors and on Pillow images.
They take turns, round by round; each starts afresh, empties the queues that filled meanwhile and is
timed alone. The ratio to Pillow is the median over rounds. Per core: views per second of processor
time, worker processes included. Results: bench/results/data.csv and .png.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, names_of, save_bars, write_table
from data_rivals import DaliStock, Ours, Side, Work, Workers
from pictures import write_pictures

from simpro_fast.config import load_config
from simpro_fast.data.batch import rank_layout
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import resolve_augment
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.listed import listed_split

SIDES: dict[str, Callable[[Work], Side]] = {
    "ours": Ours,
    "pillow": lambda work: Workers(work, "pillow"),
    "dali_stock": DaliStock,
    "torchvision_tensor": lambda work: Workers(work, "tensor"),
    "torchvision_pil": lambda work: Workers(work, "pil"),
}
WORKS = ("arrays", "jpeg")
WARM_UP = 5
"""Batches; a DataLoader with two workers has four waiting, our pipeline two."""
ARRAYS = (
    "data.name=synthetic",
    "data.classes=10",
    "data.labeled_max=50",
    "data.unlabeled_max=450",
    "data.gamma_labeled=1",
)
JPEG = ("data.name=images", "data.labeled_fraction=null", "data.total_max=null")
GATE = 3.0
"""Required ratio to Pillow on arrays."""


def make_work(name: str, folder: Path, threads: int, smoke: bool) -> Work:
    if name == "arrays":
        small = ("data.batch_size=8", "data.mu=2") if smoke else ()
        config = load_config("cifar10_lt/consistent", [*ARRAYS, *small])
        dataset: Any = load_dataset(config.data)
        split = make_split(config.data, dataset, config.seed)
    else:
        labeled, unlabeled = write_pictures(folder)
        files = (f"data.labeled={labeled}", f"data.unlabeled=[{unlabeled}]")
        batch = ("data.batch_size=2", "data.mu=2" if smoke else "data.mu=14")
        config = load_config("imagenet_1k/224", [*JPEG, *files, *batch])
        dataset = load_own_images(config.data)
        split = listed_split(config.data, dataset)
    layout = rank_layout(
        config.data,
        labeled_views=config.labeled_views,
        strong_views=config.strong_views,
        world_size=1,
    )
    views = resolve_augment(config.data, dataset)
    return Work(name, config, dataset, split, views, layout, threads)


def cpu_seconds(processes: list[int]) -> float:
    """Processor time used so far by this process and some workers of it."""
    total = time.process_time()
    for pid in processes:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def turn(make: Callable[[Work], Side], work: Work, seconds: float) -> tuple[float, float]:
    """Views per second of the clock, and of processor time."""
    side = make(work)
    for _ in range(WARM_UP):
        batch = side.next()
    size = work.augment.image_size
    assert batch.shape[1:] == (3, size, size) and batch.dtype == torch.float32
    assert batch.is_contiguous(memory_format=torch.channels_last)
    views, processes = 0, side.processes()
    started, cpu = time.perf_counter(), cpu_seconds(processes)
    while views < 3 * len(batch) or time.perf_counter() - started < seconds:
        views += len(side.next())
    elapsed, used = time.perf_counter() - started, cpu_seconds(processes) - cpu
    side.close()
    return views / elapsed, views / used


def measure(work: Work, sides: list[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row per side."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for index in range(rounds):
        for name in sides if index % 2 == 0 else reversed(sides):
            results[name].append(turn(SIDES[name], work, seconds))
    rows = []
    for name, pairs in results.items():
        ratios = [
            own / other
            for (own, _), (other, _) in zip(pairs, results.get("pillow", []), strict=False)
        ]
        row = {
            "work": work.name,
            "side": name,
            "views_per_second": round(statistics.median(rate for rate, _ in pairs)),
            "views_per_second_and_core": round(statistics.median(core for _, core in pairs)),
            "ratio_to_pillow": round(statistics.median(ratios), 2) if ratios else None,
            "ratio_min": round(min(ratios), 2) if ratios else None,
            "ratio_max": round(max(ratios), 2) if ratios else None,
            "rounds": rounds,
            "views_per_batch": work.layout.rows,
            "threads": work.threads,
            "dali": importlib.metadata.version("nvidia-dali-cuda130"),
            "torchvision": importlib.metadata.version("torchvision"),
            "pillow": importlib.metadata.version("pillow"),
        }
        rows.append(row)
        ratio = (
            f"{row['ratio_to_pillow']:7.2f}x ({row['ratio_min']} to {row['ratio_max']})"
            if ratios
            else ""
        )
        print(
            f"{work.name:8}{name:20}{row['views_per_second']:>10,} views/s"
            f"{row['views_per_second_and_core']:>10,} per core {ratio}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Views per second of data pipelines.")
    parser.add_argument("--work", type=names_of(WORKS), default=list(WORKS), metavar="NAME,...")
    parser.add_argument("--side", type=names_of(SIDES), default=list(SIDES), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a timed turn")
    parser.add_argument("--threads", type=int, default=2, help="or worker processes, of each side")
    parser.add_argument("--smoke", action="store_true", help="one short round, nothing kept")
    options = parser.parse_args()
    rounds, seconds = (1, 0.0) if options.smoke else (options.rounds, options.seconds)
    torch.set_num_threads(1)  # the thread that takes the batches only counts them
    print("  ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.work:
            work = make_work(name, Path(folder), options.threads, options.smoke)
            rows += measure(work, options.side, rounds, seconds)
    if options.smoke:
        return 0
    for row in rows:
        if row["work"] == "arrays" and row["side"] == "ours" and row["ratio_to_pillow"]:
            verdict = "met" if row["ratio_to_pillow"] >= GATE else "MISSED"
            print(f"required on arrays: {GATE:g} times Pillow: {verdict}")
    write_table(RESULTS / "data.csv", rows, replace=("work", "side"))
    if options.work == list(WORKS) and options.side == list(SIDES):
        save_bars(
            RESULTS / "data.png",
            options.side,
            {
                f"{name}: views/s over Pillow's": [
                    row["ratio_to_pillow"] for row in rows if row["work"] == name
                ]
                for name in WORKS
            },
            title=f"Data pipelines, {options.threads} threads or workers, {machine()['machine']}",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
