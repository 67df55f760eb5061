"""How a step's time and memory grow, how long a start takes, whether memory stays flat.

    python bench/growth.py                          # all, about 4 minutes on two cores
    python bench/growth.py --axis classes,mu        # some of it
    python bench/growth.py --smoke

Every point is a process of its own that trains on synthetic images (`data.name=synthetic`) through
the real loader and the plain engine; memory is the largest resident set of that process. Start-up
is the time from an empty process to the end of the first step. `steps` repeats a tiny step 10,000
times and looks at the resident set every 1,000.
Results: bench/results/growth.csv and growth.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine, names_of, write_table

BASE = {
    "data.batch_size": 8,
    "data.mu": 8,
    "data.classes": 10,
    "data.image_size": 16,
    "data.labeled_max": 20,
    "data.unlabeled_max": 40,
}
# One key changes along an axis, the others stay as in BASE unless named here.
AXES: dict[str, tuple[str, list[int], dict[str, int]]] = {
    "batch": ("data.batch_size", [4, 8, 16, 32, 64], {}),
    "mu": ("data.mu", [1, 2, 4, 8, 16], {}),
    "classes": (
        "data.classes",
        [10, 100, 1000, 10_000, 21_841],
        {"data.labeled_max": 1, "data.unlabeled_max": 1},
    ),
    "image_size": ("data.image_size", [8, 16, 32, 64], {}),
    "images": ("data.unlabeled_max", [1_000, 10_000, 50_000], {"data.batch_size": 4}),
    "steps": ("train.steps", [10_000], {"data.batch_size": 2, "data.mu": 1, "data.image_size": 8}),
}
LOOKS = 10


def resident_mib() -> float:
    """This process's resident set now, MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def one(changes: dict[str, int], steps: int, flat: bool, started: float) -> dict[str, Any]:
    """What one process measures; `started` is the time at which it was asked for."""
    import torch

    from simpro_fast.config import load_config
    from simpro_fast.distributed.process_group import start_ranks
    from simpro_fast.training.metrics import peak_memory_mib
    from simpro_fast.training.trainer import Trainer

    config = load_config(
        "digits_lt/reversed",
        [
            "data.name=synthetic",
            "data.gamma_labeled=1",
            "data.unlabeled_distribution=consistent",
            "data.test_per_class=1",
            "distributed.engine=plain",
            "device=cpu",
            "train.threads=1",
            "train.data_threads=1",
            "log.progress=off",
            *[f"{key}={value}" for key, value in changes.items()],
        ],
    )
    trainer = Trainer(config, start_ranks(config), write=False)
    trainer.train_step()
    start_up = time.time() - started
    times, memory = [], []
    for index in range(steps):
        began = time.perf_counter()
        trainer.train_step()
        times.append(time.perf_counter() - began)
        if flat and (index + 1) % (steps // LOOKS) == 0:
            gc.collect()
            memory.append(round(resident_mib(), 1))
    views = trainer.setup.views_per_step
    images = trainer.setup.dataset.images.nbytes / 2**20
    trainer.close()
    return {
        "step_ms": round(1e3 * statistics.median(times), 3),
        "views_per_step": views,
        "views_per_second": round(views / statistics.median(times)),
        "start_up_seconds": round(start_up, 2),
        "peak_mib": round(peak_memory_mib(torch.device("cpu")), 1),
        "images_mib": round(images, 1),
        "resident_mib": " ".join(str(value) for value in memory),
    }


def in_a_process(changes: dict[str, int], steps: int, flat: bool) -> dict[str, Any]:
    task = {"changes": changes, "steps": steps, "flat": flat, "started": time.time()}
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(task)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{changes}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    axes = [name for name in AXES if name != "steps" and any(r["axis"] == name for r in rows)]
    figure = Figure(figsize=(3.2 * len(axes), 5), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False, sharex="col")
    for column, name in enumerate(axes):
        shown = [row for row in rows if row["axis"] == name]
        values = [row["value"] for row in shown]
        for row, (key, label) in enumerate((("step_ms", "ms a step"), ("peak_mib", "peak MiB"))):
            panel = panels[row][column]
            panel.plot(values, [r[key] for r in shown], "o-")
            panel.set_xscale("log")
            panel.set_ylim(0, 1.15 * max(r[key] for r in shown))
            panel.grid(alpha=0.3)
            if column == 0:
                panel.set_ylabel(label)
        panels[1][column].set_xticks(values, [f"{value:,}" for value in values], rotation=30)
        panels[1][column].minorticks_off()
        panels[0][column].set_title(AXES[name][0])
    figure.suptitle(f"One thread: {machine()['machine'].partition(',')[0]}", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description="Growth of time and memory.")
    parser.add_argument("--axis", type=names_of(AXES), default=list(AXES), metavar="AXIS,...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one point, nothing kept")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(**json.loads(options.one))))
        return 0
    rows = []
    for name in options.axis[:1] if options.smoke else options.axis:
        key, values, others = AXES[name]
        for value in values[:1] if options.smoke else values:
            flat = name == "steps"
            changes = {**BASE, **others, key: value}
            steps = value if flat else options.steps
            row = {"axis": name, "key": key, "value": value, **in_a_process(changes, steps, flat)}
            rows.append(row)
            print(
                f"{key}={value:<7} {row['step_ms']:9.2f} ms a step  {row['views_per_step']:5} "
                f"views  peak {row['peak_mib']:7.0f} MiB (images {row['images_mib']:.0f})  "
                f"start {row['start_up_seconds']:.1f} s  {row['resident_mib']}",
                flush=True,
            )
    if not options.smoke:
        write_table(RESULTS / "growth.csv", rows, replace=("axis", "value"))
        if len({row["axis"] for row in rows}) > 1:  # the figure shows all axes side by side
            draw(RESULTS / "growth.png", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
