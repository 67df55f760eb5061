"""Where a training step's time goes: data alone, training alone, both together.

    python bench/bench_step.py [--config digits_lt/reversed] [--part train] [key.sub=value ...]

`data` takes batches from the DALI loader and drops them, `train` runs the trainer's own step on
one resident synthetic batch, `full` is the real thing. Each is warmed up first and then timed step
by step, without a wait for the device; the table shows the 20th, 50th and 80th percentile and views
per second at the median.
On two CPU cores the default ends in less than a minute. `--output FILE` adds the rows to a CSV.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import machine, names_of, write_table

from simpro_fast.config import Config, load_config
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline.synthetic_loader import SyntheticLoader
from simpro_fast.distributed.environment import check_launch
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.training.metrics import peak_memory_mib
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError

WARM_UP = 5
PARTS = ("data", "train", "full")


def timed(step: Callable[[int], Any], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each step after the warm-up, sorted.

    As in training, the host does not wait for the device: there each step ends with an event, and
    only the last one is waited for.
    """
    marks: list[Any] = []
    cuda = device.type == "cuda"
    for i in range(WARM_UP + steps):
        step(i)
        if i >= WARM_UP - 1:
            marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
            if cuda:
                marks[-1].record()
    if cuda:
        marks[-1].synchronize()
    between = itertools.pairwise(marks)
    return sorted(a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in between)


def measure(config: Config, parts: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """One row for each of `parts`, as soon as it is measured."""
    ranks = start_ranks(config)
    for part in parts:
        make_loader = SyntheticLoader if part == "train" else build_loader
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(config, ranks, make_loader=make_loader, write=False)
        run = trainer.loader.next if part == "data" else lambda _, t=trainer: t.train_step()
        times = timed(run, steps, ranks.device)
        trainer.close()
        p20, p50, p80 = (times[int(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
        yield {
            "part": part,
            "config": config.name,
            "model": config.model.name,
            "image_size": trainer.setup.dataset.image_size,
            "classes": trainer.setup.dataset.num_classes,
            "views": trainer.setup.views_per_step,
            "precision": config.train.precision,
            "compile": config.train.compile,
            "cuda_graph": trainer.step_graph is not None,
            "cudnn_benchmark": config.train.cudnn_benchmark,
            "tf32": config.train.tf32,
            "norm": config.model.norm_impl,
            "loss": config.method.impl,
            "steps": steps,
            "ms_p20": round(p20, 2),
            "ms_p50": round(p50, 2),
            "ms_p80": round(p80, 2),
            "views_per_second": round(1e3 * trainer.setup.views_per_step / p50),
            "peak_memory_mib": peak_memory_mib(ranks.device),
            "engine": config.distributed.engine,
        }
    stop_ranks()


def main() -> int:
    parser = argparse.ArgumentParser(description="Time data, training and the full step.")
    parser.add_argument("--config", default="digits_lt/reversed")
    parser.add_argument("--part", type=names_of(PARTS), default=PARTS, metavar="PART,...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="CSV file to add the rows to")
    options, overrides = parser.parse_known_args()
    config = load_config(options.config, ["log.progress=off", *overrides])
    check_launch(config)
    print(f"{config.name}, {machine()['machine']}")
    print("           p20 ms    p50 ms    p80 ms     views/s  peak MiB  one graph")
    same = ["part", "config", "image_size", "views", "precision", "compile", "cuda_graph"]
    same += ["cudnn_benchmark", "tf32", "norm", "loss", "engine"]
    for row in measure(config, options.part, options.steps):
        print(
            f"{row['part']:6}{row['ms_p20']:>10.2f}{row['ms_p50']:>10.2f}{row['ms_p80']:>10.2f}"
            f"{row['views_per_second']:>12,}{row['peak_memory_mib']:>10,.0f}  "
            f"{'yes' if row['cuda_graph'] else 'no'}",
            flush=True,
        )
        if options.output:
            write_table(options.output, [row], replace=same)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
