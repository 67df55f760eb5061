"""Weak and strong scaling: measured over gloo ranks here, predicted for GPU clusters.

    python bench/scaling.py                                   # about 2 minutes on two cores
    python bench/scaling.py --step-ms wrn_28_2=9.8            # predict from a measured step
    python bench/scaling.py distributed.sync_bn=average_buffers
    python bench/scaling.py --smoke

Measured: the trainer's own step with the plain engine and one resident batch, one thread per rank,
so that 1 and 2 ranks have a core each on two cores and 4 share them. Collectives and their bytes
are counted while it runs, and the same cost model that predicts clusters predicts the step from
them and from the all-reduce times measured in the same run.

Predicted: seconds(N) = step of one GPU + every collective that nothing hides, from the bytes and
gradient buckets of the network and the all-reduce times of bench/links.py. Steps of one GPU are
goals and models (see STEP_MS), not measurements, until given by --step-ms.
Results: bench/results/scaling.csv, scaling_model.csv and scaling.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_step import synthetic_loader
from common import RESULTS, machine, write_table
from links import all_reduce_seconds
from torch.nn.modules.batchnorm import _BatchNorm

from simpro_fast.config import load_config
from simpro_fast.config.schema import ModelConfig
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.engine.gradient_sync import BUCKET_ELEMENTS
from simpro_fast.models import build_model
from simpro_fast.training.trainer import Trainer

WORLDS = (1, 2, 4)
PER_RANK, STRONG_TOTAL = 8, 16
GPUS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
# ms of one H100's step: WRN-28-2, B 64, mu 8 (the project's goal) and ResNet-50 at 224 px, B 32,
# mu 2 (22 % of the peak, as MLPerf runs reach): no run of ours.
STEP_MS = {"wrn_28_2": 11.0, "resnet50": 35.8}
SIDES = {"wrn_28_2": 32, "resnet50": 224}
BACKWARD_SHARE = 2 / 3
# Published efficiencies (GPUs, fraction of perfect), with the systems in the legend.
PUBLISHED = {
    "Goyal et al. 2017, ResNet-50, P100": [(256, 0.90)],
    "Horovod, Pascal": [(512, 0.90)],
    "MXNet ResNet-50, A100": [(8, 0.978)],
    "EfficientNet-B4, A100": [(64, 0.89)],
    "MLPerf ResNet-50, H100, of 8 GPUs (strong)": [
        (64, 0.66),
        (768, 0.63),
        (2528, 0.38),
        (3584, 0.41),
    ],
}


@dataclass(frozen=True)
class Traffic:
    """What a step of one network sends, per rank."""

    gradient_bytes: int
    norm_layers: int
    buffer_bytes: int


def traffic(name: str, num_classes: int = 1000) -> Traffic:
    model = build_model(ModelConfig(name=name), num_classes, SIDES[name])
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return Traffic(
        gradient_bytes=4 * sum(p.numel() for p in model.parameters()),
        norm_layers=sum(isinstance(m, _BatchNorm) for m in model.modules()),
        buffer_bytes=8 * sum(b.numel() for b in buffers),
    )


def predicted(step: float, sent: Traffic, gpus: int, *, sync_bn: bool) -> dict[str, float]:
    """Seconds of each part of a step on `gpus` GPUs that keep their batch (weak scaling)."""
    # Buckets travel behind the backward pass, except for the last one, which ends it.
    buckets = -(-sent.gradient_bytes // (4 * BUCKET_ELEMENTS))
    gradients = max(
        all_reduce_seconds(sent.gradient_bytes / buckets, gpus),
        all_reduce_seconds(sent.gradient_bytes, gpus) - BACKWARD_SHARE * step,
    )
    # Each layer's statistics wait for all ranks once forward and once backward.
    small = all_reduce_seconds(0, gpus)
    norms = 2 * sent.norm_layers * small if sync_bn else all_reduce_seconds(sent.buffer_bytes, gpus)
    return {"compute": step, "gradients": gradients, "batch_norm": norms, "flag": small}


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
            "views": trainer.views_per_step,
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
            share = 1.0 if kind == "weak" else 1 / world
            model = alone["seconds"] * share + (communication if world > 1 else 0.0)
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
                    "predicted_step_ms": round(1e3 * model, 2),
                }
            )
    return rows


def model_rows(step_ms: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for name, step in step_ms.items():
        sent = traffic(name)
        for norm in ("sync_bn", "average_buffers"):
            for gpus in GPUS:
                parts = predicted(step / 1e3, sent, gpus, sync_bn=norm == "sync_bn")
                total = sum(parts.values())
                rows.append(
                    {
                        "model": name,
                        "batch_norm": norm,
                        "gpus": gpus,
                        "step_ms": round(1e3 * total, 3),
                        "efficiency": round(step / 1e3 / total, 3),
                        **{f"{k}_ms": round(1e3 * v, 3) for k, v in parts.items()},
                        "gradient_mb": round(sent.gradient_bytes / 1e6, 1),
                        "norm_layers": sent.norm_layers,
                    }
                )
    return rows


def draw(path: Path, measured: list[dict[str, Any]], model: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    for kind, colour in (("weak", "tab:blue"), ("strong", "tab:orange")):
        rows = [row for row in measured if row["scaling"] == kind]
        worlds = [row["ranks"] for row in rows]
        left.plot(worlds, [r["efficiency"] for r in rows], "o-", color=colour, label=kind)
        fraction = [r["step_ms"] / r["predicted_step_ms"] * r["efficiency"] for r in rows]
        left.plot(worlds, fraction, ":", color=colour, label=f"{kind}, cost model")
    left.set_xscale("log", base=2)
    left.set_xticks(worlds, [str(world) for world in worlds])
    left.set_xlabel("gloo ranks on 2 cores (4 share them)")
    left.set_ylabel("efficiency")
    left.set_title("measured here")
    styles = {"sync_bn": "-", "average_buffers": "--"}
    for name, colour in (("wrn_28_2", "tab:green"), ("resnet50", "tab:purple")):
        for norm, style in styles.items():
            rows = [r for r in model if r["model"] == name and r["batch_norm"] == norm]
            right.plot(
                [r["gpus"] for r in rows],
                [r["efficiency"] for r in rows],
                style,
                color=colour,
                label=f"{name}, {norm}",
            )
    for (name, points), marker in zip(PUBLISHED.items(), "osD^v", strict=True):
        right.plot(*zip(*points, strict=True), marker, color="0.3", ms=5, ls="none", label=name)
    right.set_xscale("log", base=2)
    right.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
    right.set_xlabel("GPUs (8 per node), batch per GPU kept")
    right.set_title("predicted (lines) and published (points)")
    for axis in (left, right):
        axis.set_ylim(0, 1.05)
        axis.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=7, loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description="Scaling over ranks: measured and predicted.")
    parser.add_argument("--steps", type=int, default=15, help="of each measurement")
    parser.add_argument(
        "--step-ms", action="append", default=[], metavar="MODEL=MS", help="measured on one GPU"
    )
    parser.add_argument("--smoke", action="store_true", help="2 ranks, 1 step, nothing kept")
    options, overrides = parser.parse_known_args()
    step_ms = dict(STEP_MS)
    for item in options.step_ms:
        name, _, value = item.partition("=")
        if name not in STEP_MS or not value.replace(".", "", 1).isdigit():
            parser.error(f"--step-ms {item}: give one of {', '.join(STEP_MS)} as NAME=NUMBER")
        step_ms[name] = float(value)
    worlds, steps = ((1, 2), 1) if options.smoke else (WORLDS, options.steps)
    measured, model = measure(worlds, steps, overrides), model_rows(step_ms)
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    for row in measured:
        print(
            f"{row['scaling']:7}{row['ranks']:3} ranks {row['step_ms']:9.1f} ms a step "
            f"(model {row['predicted_step_ms']:.1f})  efficiency {row['efficiency']:.2f}  "
            f"{row['collectives']} collectives, {row['kib_per_step']} KiB"
        )
    for row in model:
        if row["gpus"] in (8, 64, 512, 4096):
            parts = {k: row[f"{k}_ms"] for k in ("gradients", "batch_norm", "flag")}
            first = max(parts, key=lambda part: parts[part])
            print(
                f"{row['model']:9} {row['batch_norm']:16}{row['gpus']:5} GPUs  efficiency "
                f"{row['efficiency']:.2f}; first limit: {first}, {parts[first]:.2f} ms"
            )
    if not options.smoke:
        write_table(RESULTS / "scaling.csv", measured, replace=("scaling", "ranks", "batch_norm"))
        write_table(RESULTS / "scaling_model.csv", model, replace=("model", "batch_norm", "gpus"))
        draw(RESULTS / "scaling.png", measured, model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
