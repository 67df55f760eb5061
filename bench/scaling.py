"""Weak and strong scaling of the training step over gloo ranks on this machine.

    python bench/scaling.py                                   # about 2 minutes on two cores
    python bench/scaling.py distributed.sync_bn=average_buffers
    python bench/scaling.py --smoke

The trainer's own step with the plain engine and one resident batch, one thread per rank, so that 1
and 2 ranks have a core each on two cores and 4 share them. Collectives and their bytes are counted
while it runs, and all-reduces of these sizes are timed alone. Results: bench/results/scaling.csv
and scaling.png.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_step import synthetic_loader
from common import RESULTS, machine, write_table

from simpro_fast.config import load_config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.trainer import Trainer

WORLDS = (1, 2, 4)
PER_RANK, STRONG_TOTAL = 8, 16


def count_collectives() -> tuple[list[int], Callable[[], None]]:
    """Bytes of every all-reduce from now on; the second value ends the counting."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *arguments, **options)

    dist.all_reduce = counting

    def stop() -> None:
        dist.all_reduce = original

    return sizes, stop


def measured_rank(rank: int, world: int, folder: str, steps: int, overrides: list[str]) -> None:
    """One of `world` ranks: steps under weak and strong scaling, and plain all-reduces."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store{world}", world), rank=rank, world_size=world
    )
    ranks = Ranks(rank, rank, world, world, torch.device("cpu"))
    results: dict[str, Any] = {}
    for kind, batch in (("weak", PER_RANK * world), ("strong", STRONG_TOTAL)):
        config = load_config(
            "digits_lt/reversed",
            [
                f"data.batch_size={batch}",
                "distributed.engine=plain",
                "train.threads=1",
                "log.progress=off",
                "device=cpu",
                *overrides,
            ],
        )
        trainer = Trainer(config, ranks, make_loader=synthetic_loader, write=False)
        for _ in range(3):
            trainer.train_step()
        sizes, stop = count_collectives()
        trainer.train_step()
        stop()
        times = []
        for _ in range(steps):
            dist.barrier()
            started = time.perf_counter()
            trainer.train_step()
            times.append(time.perf_counter() - started)
        trainer.close()
        results["batch_norm"] = str(config.distributed.sync_bn)
        results[kind] = {
            "seconds": statistics.median(times),
            "views": trainer.setup.views_per_step,
            "bytes": sizes,
        }
    sizes_sent = {size for kind in ("weak", "strong") for size in results[kind]["bytes"]}
    for size in sorted(sizes_sent):
        payload = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(20):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(payload)
            times.append(time.perf_counter() - started)
        results[f"all_reduce {size}"] = statistics.median(times)
    if rank == 0:
        torch.save(results, f"{folder}/world{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(worlds: tuple[int, ...], steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """One row per kind of scaling and number of ranks."""
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            mp.spawn(measured_rank, (world, folder, steps, overrides), nprocs=world)
            found[world] = torch.load(f"{folder}/world{world}.pt", weights_only=True)
    rows = []
    for kind in ("weak", "strong"):
        alone = found[1][kind]
        rate = alone["views"] / alone["seconds"]
        for world, results in found.items():
            here = results[kind]
            communication = sum(results[f"all_reduce {size}"] for size in here["bytes"])
            views = here["views"] / here["seconds"]
            rows.append(
                {
                    "scaling": kind,
                    "ranks": world,
                    "batch_norm": results["batch_norm"],
                    "views_per_step": here["views"],
                    "step_ms": round(1e3 * here["seconds"], 2),
                    "views_per_second": round(views),
                    "efficiency": round(views / (world * rate), 3),
                    "collectives": len(here["bytes"]) if world > 1 else 0,
                    "kib_per_step": round(sum(here["bytes"]) / 1024, 1) if world > 1 else 0,
                    "communication_ms": round(1e3 * communication, 2) if world > 1 else 0,
                }
            )
    return rows


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axis = figure.subplots()
    for kind, colour in (("weak", "tab:blue"), ("strong", "tab:orange")):
        for norm, name, style in (
            ("average_buffers", "average_buffers", "o--"),
            ("True", "synchronised batch norm", "o-"),
        ):
            shown = [r for r in rows if (r["scaling"], r["batch_norm"]) == (kind, norm)]
            worlds = [int(row["ranks"]) for row in shown]
            efficiencies = [float(row["efficiency"]) for row in shown]
            label = f"{kind} scaling, {name}"
            axis.plot(worlds, efficiencies, style, color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(WORLDS, [str(world) for world in WORLDS])
    axis.set_xlabel("gloo ranks on 2 cores (4 share them)")
    axis.set_ylabel("efficiency")
    axis.set_ylim(0, 1.05)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description="Scaling of the step over ranks.")
    parser.add_argument("--steps", type=int, default=15, help="of each measurement")
    parser.add_argument("--smoke", action="store_true", help="2 ranks, 1 step, nothing kept")
    options, overrides = parser.parse_known_args()
    worlds, steps = ((1, 2), 1) if options.smoke else (WORLDS, options.steps)
    measured = measure(worlds, steps, overrides)
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    for row in measured:
        print(
            f"{row['scaling']:7}{row['ranks']:3} ranks {row['step_ms']:9.1f} ms a step "
            f"(collectives alone {row['communication_ms']:.1f})  "
            f"efficiency {row['efficiency']:.2f}  "
            f"{row['collectives']} collectives, {row['kib_per_step']} KiB"
        )
    if not options.smoke:
        results = RESULTS / "scaling.csv"
        write_table(results, measured, replace=("scaling", "ranks", "batch_norm"))
        with results.open(newline="", encoding="utf-8") as file:
            here = machine()["machine"]
            rows = [row for row in csv.DictReader(file) if row["machine"] == here]
        draw(RESULTS / "scaling.png", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
