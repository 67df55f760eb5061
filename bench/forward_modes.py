"""What `train.weak_forward` and `train.strong_forward` cost in accuracy and save in work.

    python bench/forward_modes.py                                   # reversed, seeds 1 2 3
    python bench/forward_modes.py --only consistent
    python bench/forward_modes.py --table                           # the table, from what is there
    python bench/forward_modes.py --set digits_lt --steps 20 --seeds 1    # a short try

SimPro on Fashion-MNIST-LT with one torch and one data thread; per seed one run of each mode:

    concat      one pass over all views, as published
    no_grad     weak views in a pass of their own, without backward
    confident   the same, and only the strong views of images that pass the threshold

Finished runs are skipped and an interrupted one goes on from its checkpoint. Results are in
bench/results/forward_modes.csv (one line per run) and .md (mean and standard deviation over seeds).
`cpu_seconds_per_step` is the process's CPU time inside `train_step`, which neighbours on the same
machine disturb less than wall time. `work` is what the passes cost in units of the published step,
from the rows that really ran: a row costs 1 forward and 2 backward.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simpro_fast.config import Config, load_config
from simpro_fast.distributed.environment import check_launch
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.engine.base import NetworkOutput
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import git_commit

RESULTS = Path(__file__).resolve().parent / "results"
MODES = {
    "concat": [],
    "no_grad": ["train.weak_forward=no_grad"],
    "confident": ["train.weak_forward=no_grad", "train.strong_forward=confident"],
}
KEYS = ("set", "distribution", "mode", "seed")


class CountingTrainer(Trainer):
    """Counts the rows that pass through the network, and the CPU time of the steps."""

    def __init__(self, config: Config, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.cpu_seconds = self.wall_seconds = 0.0
        self.counted_steps = self.rows_forward = self.rows_backward = 0
        run = self.algorithm.engine.forward

        def forward(views: Tensor) -> NetworkOutput:
            self.rows_forward += len(views)
            self.rows_backward += len(views) * torch.is_grad_enabled()
            return run(views)

        self.algorithm.engine.forward = forward  # type: ignore[method-assign]

    def train_step(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        super().train_step()
        self.cpu_seconds += time.process_time() - cpu
        self.wall_seconds += time.perf_counter() - wall
        self.counted_steps += 1


def train(config: Config, mode: str, distribution: str) -> dict[str, Any]:
    """One line of the results."""
    check_launch(config)
    trainer = CountingTrainer(config, start_ranks(config))
    try:
        summary = trainer.fit()
    finally:
        trainer.close()
        stop_ranks()
    lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps, views = trainer.counted_steps, trainer.setup.views_per_step
    forward, backward = trainer.rows_forward / steps, trainer.rows_backward / steps
    return {
        "set": config.data.name,
        "distribution": distribution,
        "mode": mode,
        "seed": config.seed,
        "steps": trainer.step,
        "top1": round(summary["top1"], 2),
        "top1_mean_last20": round(summary["top1_mean_last20"], 2),
        "kl_pi_u": round(summary["kl_pi_u"], 4),
        "mask_rate": round(statistics.mean(json.loads(line)["mask_rate"] for line in lines), 4),
        "rows_forward": round(forward, 1),
        "rows_backward": round(backward, 1),
        "work": round((forward + 2 * backward) / (3 * views), 4),
        "cpu_seconds_per_step": round(trainer.cpu_seconds / steps, 4),
        "wall_seconds_per_step": round(trainer.wall_seconds / steps, 4),
        "steps_timed": steps,
        "engine": config.distributed.engine,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": git_commit(),
        "machine": machine_name(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and, with several seeds, standard deviation of every distribution and mode."""
    columns = {
        "top-1 %": ("top1", 1),
        "KL(true, pi_u)": ("kl_pi_u", 2),
        "mask rate": ("mask_rate", 2),
        "work": ("work", 2),
        "CPU s / step": ("cpu_seconds_per_step", 3),
        "wall s / step": ("wall_seconds_per_step", 3),
    }
    text = ["| set | unlabeled | mode | seeds | " + " | ".join(columns) + " |"]
    text += ["|---" * (4 + len(columns)) + "|"]
    for (dataset, distribution), mode in itertools.product(
        sorted({(r["set"], r["distribution"]) for r in rows}), MODES
    ):
        chosen = [
            r
            for r in rows
            if (r["set"], r["distribution"], r["mode"]) == (dataset, distribution, mode)
        ]
        if not chosen:
            continue
        cells = []
        for key, digits in columns.values():
            values = [float(r[key]) for r in chosen]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}")
        text.append(
            f"| {dataset} | {distribution} | {mode} | {len(chosen)} | " + " | ".join(cells) + " |"
        )
    return "\n".join(text) + "\n"


def read_rows() -> list[dict[str, Any]]:
    path = RESULTS / "forward_modes.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add_row(row: dict[str, Any]) -> None:
    rows = sorted([*read_rows(), row], key=lambda r: [str(r[key]) for key in KEYS])
    text = [",".join(row)]
    text += [",".join(f'"{v}"' if "," in str(v) else str(v) for v in r.values()) for r in rows]
    write_atomically(RESULTS / "forward_modes.csv", "\n".join(text) + "\n")
    write_atomically(RESULTS / "forward_modes.md", table(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy and cost of the forward modes.")
    parser.add_argument("--set", default="fashion_mnist_lt")
    parser.add_argument("--only", default="reversed", help="distribution of the unlabeled images")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="another length; such runs are only printed")
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows()))
        return 0
    cells = list(itertools.product(options.seeds, options.modes))
    if len(cells) > 1:
        # DeepSpeed's groups outlive a run, so every run has a process of its own.
        same = ["--set", options.set, "--only", options.only]
        same += ["--steps", str(options.steps)] if options.steps else []
        for seed, mode in cells:
            one = [sys.executable, __file__, *same, "--seeds", str(seed), "--modes", mode]
            subprocess.run(one, check=True)
        return 0
    run_cell(options, *cells[0])
    return 0


def run_cell(options: argparse.Namespace, seed: int, mode: str) -> None:
    """Train one cell of the table unless its result is there."""
    settings = [
        f"name=forward_modes/{options.set}_{options.only}_{mode}",
        f"seed={seed}",
        "train.threads=1",
        "train.data_threads=1",
        "log.progress=off",
        "log.figures=false",
        *MODES[mode],
    ]
    if options.steps:
        settings += [f"train.steps={options.steps}", f"name=forward_modes/try_{mode}"]
    config = load_config(f"{options.set}/{options.only}", settings)
    cell = [str(v) for v in (config.data.name, options.only, mode, seed)]
    if not options.steps and cell in [[r[key] for key in KEYS] for r in read_rows()]:
        print(f"{' '.join(cell)}: already in the results")
        return
    print(" ".join(cell), flush=True)
    row = train(config, mode, options.only)
    print(json.dumps(row), flush=True)
    if not options.steps:
        add_row(row)


if __name__ == "__main__":
    sys.exit(main())
