"""Cached features: `embed` against a bare forward pass, a step against its products, and both
against a frozen backbone that sees the views of every step.

    python bench/bench_features.py [--images 400] [--rounds 5] [--threads 1] [key.sub=value ...]

Made-up images of 64 px in 50 classes through timm's tf_efficientnet_lite0 (D = 1,280) with made-up
weights. In every round, one after the other: the network alone over as many views as are embedded,
in batches of the same size; `embed` whole, with reading weights and writing files; steps of SimPro
on the cached features (64 labeled images in two views, 448 unlabeled ones in three); the matrix
products of such a step, forward and backward; steps of the same on images, through the frozen
backbone. `end to end` is `embed` and 2,000 cached steps, over 2,000 steps on images, both from the
measured times. Rows go to bench/results/features.csv; nothing is kept with --smoke.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_table
from safetensors.torch import save_file

from simpro_fast.config import Config, load_config
from simpro_fast.data.batch import BatchLayout
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.distributed.process_group import Ranks, start_ranks, stop_ranks
from simpro_fast.models import build_model
from simpro_fast.training.embed import BATCH, embed
from simpro_fast.training.features import FeatureExtractor, pretrained_network
from simpro_fast.training.setup import resolved_data
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError

WEAK, STRONG = 2, 4
STEPS, WARM_UP, IMAGE_STEPS, WHOLE = 100, 10, 3, 2_000


def configured(folder: Path, images: int, threads: int, overrides: list[str]) -> Config:
    """Made-up data, and weights for the backbone in `folder`."""
    made_up = [
        *("data.name=synthetic", "data.classes=50", "data.image_size=64", "data.unlabeled_max=1"),
        *(f"data.labeled_max={max(1, images // 50)}", "data.gamma_labeled=1", "data.mu=7"),
        *("data.batch_size=64", "data.gamma_unlabeled=1", "data.overlap=true"),
        *("model.name=timm/tf_efficientnet_lite0", f"model.weights={folder}/backbone.safetensors"),
        *(
            "model.bn_momentum=null",
            "optim.backbone_lr_scale=0",
            "distributed.engine=plain",
            f"train.threads={threads}",
        ),
    ]
    config = load_config("cifar10_lt/consistent", [*made_up, *overrides])
    save_file(build_model(config.model, 2, 64).state_dict(), folder / "backbone.safetensors")
    return config


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def forward_alone(config: Config, dataset: ArrayDataset, views: int) -> Callable[[], None]:
    extract = FeatureExtractor(pretrained_network(config, dataset))
    rows = BATCH * (1 + STRONG // WEAK)
    batch = torch.randn(rows, 3, dataset.image_size, dataset.image_size)
    batch = batch.contiguous(memory_format=torch.channels_last)

    def run() -> None:
        for first in range(0, views, rows):
            extract(batch[: views - first])

    return run


def steps(config: Config, ranks: Ranks, warm_up: int, count: int) -> tuple[float, BatchLayout]:
    """Seconds of so many steps, and the layout of one."""
    trainer = Trainer(config, ranks, write=False)
    for _ in range(warm_up):
        trainer.train_step()
    taken = seconds(lambda: [trainer.train_step() for _ in range(count)])  # type: ignore[func-returns-value]
    trainer.close()
    return taken, trainer.setup.layout


def products(rows: tuple[int, int], features: int, classes: int) -> Callable[[], None]:
    """Logits of all rows, and the gradient of the weights by those that have one."""
    x, weight = torch.randn(sum(rows), features), torch.randn(classes, features)
    gradient = torch.randn(rows[0], classes)

    def run() -> None:
        for _ in range(STEPS):
            x @ weight.T
            gradient.T @ x[: rows[0]]

    return run


def measure(config: Config, ranks: Ranks, folder: Path, rounds: int) -> list[dict[str, Any]]:
    dataset = load_dataset(resolved_data(config)[0])
    views = len(dataset.images) * (1 + WEAK + STRONG)
    if dataset.test_images is not None:
        views += len(dataset.test_images)
    alone, found = forward_alone(config, dataset, views), dict[str, list[float]]()
    for turn in range(rounds):
        place = folder / f"features{turn}"
        times = {"forward alone": seconds(alone)}
        times["embed"] = seconds(
            lambda place=place: embed(  # type: ignore[misc]
                config, dataset, ranks, place, weak=WEAK, strong=STRONG, resume=False
            )
        )
        cached = config.model_copy(
            update={"train": config.train.model_copy(update={"features": place})}
        )
        times["cached steps"], layout = steps(cached, ranks, WARM_UP, STEPS)
        times["steps on images"], _ = steps(config, ranks, 1, IMAGE_STEPS)
        labeled, weak, strong = layout.rows_by_kind
        work = products((labeled + strong, weak), 1280, dataset.num_classes)
        work()
        times["products"] = seconds(work)
        times["end to end"] = times["embed"] + times["cached steps"] / STEPS * WHOLE
        times["frozen backbone"] = times["steps on images"] / IMAGE_STEPS * WHOLE
        for name, value in times.items():
            found.setdefault(name, []).append(value)
        print(", ".join(f"{name} {value:.2f} s" for name, value in times.items()), flush=True)
    rows = []
    for name, base, count in (
        ("embed", "forward alone", views),
        ("cached steps", "products", STEPS),
        ("end to end", "frozen backbone", WHOLE),
    ):
        ratios = [a / b for a, b in zip(found[name], found[base], strict=True)]
        rows.append(
            {
                "what": name,
                "over": base,
                "ms_each": round(1e3 * statistics.median(found[name]) / count, 3),
                "base_ms_each": round(1e3 * statistics.median(found[base]) / count, 3),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "rounds": rounds,
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Time cached features.")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="few images, nothing kept")
    options, overrides = parser.parse_known_args()
    images, rounds = (50, 1) if options.smoke else (options.images, options.rounds)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configured(Path(folder), images, options.threads, overrides)
            rows = measure(config, start_ranks(config), Path(folder), rounds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        stop_ranks()
    for row in rows:
        print(row)
    if not options.smoke:
        write_table(RESULTS / "features.csv", rows, replace=("what", "threads"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
