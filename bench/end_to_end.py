"""Views trained per second: ours against the usual way to write it, side by side.

    python bench/end_to_end.py                                  # digits, Fashion-MNIST, CIFAR shape
    python bench/end_to_end.py --recipe resnet50_32,resnet50_64,resnet50_224
    python bench/end_to_end.py --device cuda train.precision=bf16 train.compile=default
    python bench/end_to_end.py --recipe digits --smoke          # a check in seconds, nothing kept

First both take three steps from the same weights and the same batches, and the bench stops unless
losses, weights and EMA agree. Then three parts are timed in turns, round by round:
`data` (batches made and dropped), `train` (steps on one resident batch), `full` (the real thing).
The ratio is the median over rounds of neighbouring turns, so a busy neighbour hurts both. Before a
turn the other side has a second to fill its queues, and warm-up steps empty one's own. Overrides
apply to ours; the baseline (`bench/baseline.py`) is float32 and eager, as described there.
Results: bench/results/end_to_end.csv and .png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baseline import Baseline, PillowLoader
from common import RESULTS, machine, names_of, save_bars, write_table
from pictures import write_pictures

from simpro_fast.config import Config, load_config
from simpro_fast.data.batch import Batch, Loader, LoaderSettings
from simpro_fast.data.loader import build_loader, resolve_augment
from simpro_fast.data.pipeline.synthetic_loader import SyntheticLoader
from simpro_fast.distributed.environment import check_launch
from simpro_fast.distributed.process_group import Ranks, choose_algorithms, start_ranks, stop_ranks
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.machine import cpu_cores

# Neighbouring turns of both, after this many steps that empty the queues filled before the turn.
WARM_UP = {"data": 6, "train": 2, "full": 6}
SETTLE_SECONDS = 1.0
PASSED_BY_A_FRESH_NETWORK = 0.005
"""Below 1 / K of every recipe here: all images pass."""
# In float32 the order of a sum decides on which side of a kink some activations fall, so single
# weights part by more than rounding; the whole update does not.
LOSS_TOLERANCE, UPDATE_TOLERANCE, PRIOR_TOLERANCE = 1e-4, 2e-2, 1e-5


@dataclass(frozen=True)
class Recipe:
    """A shipped configuration on data that needs no download, and its batch on a CPU."""

    config: str
    overrides: tuple[str, ...] = ()
    cpu_batch: tuple[int, int] | None = None
    """(batch_size, mu) that two cores can bear; None: the recipe's own."""
    pictures: bool = False
    """JPEG files, written for the occasion."""
    cpu_steps: int = 8
    """Timed steps of a turn on a CPU, unless --steps says otherwise."""


def synthetic(classes: int, *more: str) -> tuple[str, ...]:
    return (
        "data.name=synthetic",
        f"data.classes={classes}",
        "data.labeled_fraction=null",
        "data.total_max=null",
        "data.gamma_labeled=1",
        *more,
    )


RECIPES = {
    "digits": Recipe("digits_lt/reversed"),
    "fashion_mnist": Recipe("fashion_mnist_lt/reversed"),
    "cifar": Recipe("cifar10_lt/consistent", synthetic(10), cpu_batch=(8, 8), cpu_steps=4),
    "resnet50_32": Recipe(
        "small_imagenet_127/32",
        synthetic(127, "data.image_size=32", "data.labeled_max=20", "data.unlabeled_max=60"),
        cpu_batch=(2, 2),
        cpu_steps=2,
    ),
    "resnet50_64": Recipe(
        "small_imagenet_127/64",
        synthetic(127, "data.image_size=64", "data.labeled_max=20", "data.unlabeled_max=60"),
        cpu_batch=(2, 2),
        cpu_steps=2,
    ),
    "resnet50_224": Recipe(
        "imagenet_1k/224",
        ("data.name=images", "data.labeled_fraction=null", "data.total_max=null"),
        cpu_batch=(2, 2),
        cpu_steps=2,
        pictures=True,
    ),
}
CPU_RECIPES = ["digits", "fashion_mnist", "cifar"]


class Remembering:
    """A loader that keeps its last batch, so that the baseline can train on the same."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.last: Batch | None = None

    def next(self, step: int) -> Batch:
        self.last = self._loader.next(step)
        return self.last

    def describe(self, step: int) -> dict[str, Any]:
        return self._loader.describe(step)

    def close(self) -> None:
        self._loader.close()


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All floating-point parameters and buffers as one float64 vector."""
    tensors = model.state_dict().values()
    return torch.cat([t.detach().double().flatten() for t in tensors if t.is_floating_point()])


def same_mathematics(config: Config, ranks: Ranks, steps: int = 3) -> None:
    """Stop unless both make the same update from the same weights and batch.

    A period of two steps and a threshold that some images of a fresh network pass let the priors
    move in between, so that the last step is adjusted by priors that both have updated.

    Raises:
        UserError: naming what differs at which step.
    """
    changes = {
        "train": {"precision": "fp32", "tf32": False, "period": 2},
        "method": {"threshold": min(PASSED_BY_A_FRESH_NETWORK, config.method.threshold)},
    }
    exact = config.model_copy(
        update={part: getattr(config, part).model_copy(update=to) for part, to in changes.items()}
    )
    choose_algorithms(exact)  # without TF32, whose roundings differ where the order of a sum does
    trainer = Trainer(
        exact,
        ranks,
        make_loader=lambda *a, **k: Remembering(build_loader(*a, **k)),
        write=False,
    )
    other = Baseline(exact, trainer.algorithm.student, trainer.state.split, trainer.setup.alpha)
    seen = 0.0
    for step in range(steps):
        other.model.load_state_dict(trainer.algorithm.student.state_dict())
        other.ema.load_state_dict(trainer.algorithm.average.state_dict())
        before = flat(other.model), flat(other.ema)
        trainer.train_step()
        total = float(trainer.meter.sums[0])
        ours, seen = total - seen, total
        theirs = other.step(trainer.loader.last)  # type: ignore[attr-defined]
        apart = {"losses": abs(ours - theirs) / (LOSS_TOLERANCE * max(1.0, abs(theirs)))}
        for what, start, mine, yours in (
            ("updates of the weights", before[0], trainer.algorithm.student, other.model),
            ("updates of the averages", before[1], trainer.algorithm.average.module, other.ema),
        ):
            distance = (flat(mine) - flat(yours)).norm() / (flat(yours) - start).norm()
            apart[what] = float(distance) / UPDATE_TOLERANCE
        if trainer.step % exact.train.period == 0:
            start = trainer.algorithm.method.pi_u.clone()
            trainer.algorithm.method.update_priors()
            if torch.equal(trainer.algorithm.method.pi_u, start):
                raise UserError(f"step {step}: no image passed the threshold, the priors stayed")
            for what, prior, usual in (
                ("pi_u", trainer.algorithm.method.pi_u, other.pi_u),
                ("phi", trainer.algorithm.method.phi, other.phi),
            ):
                apart[what] = float((prior - usual).abs().max()) / PRIOR_TOLERANCE
        for what, tolerances in apart.items():
            if not tolerances <= 1:
                raise UserError(
                    f"step {step}: {what} of ours and of the baseline differ by "
                    f"{tolerances:.1f} times the tolerance; nothing is timed"
                )
    trainer.close()
    choose_algorithms(config)
    print(f"same losses, weights and priors from the same batches for {steps} steps", flush=True)


def turn(step: Callable[[], Any], part: str, steps: int, device: torch.device) -> float:
    """Seconds per step of one turn."""
    time.sleep(SETTLE_SECONDS)
    for _ in range(WARM_UP[part]):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def measure(
    name: str, config: Config, ranks: Ranks, parts: list[str], rounds: int, steps: int, workers: int
) -> Iterator[dict[str, Any]]:
    """One row per part, as soon as it is measured: views per second of both and their ratio."""
    for part in parts:
        make = SyntheticLoader if part == "train" else build_loader
        ours = Trainer(config, ranks, make_loader=make, write=False)
        theirs = Baseline(config, ours.algorithm.student, ours.state.split, ours.setup.alpha)
        settings = LoaderSettings(
            data=config.data,
            labeled_views=config.labeled_views,
            strong_views=config.strong_views,
            device=ranks.device,
        )
        resident = SyntheticLoader(settings, ours.setup.dataset, ours.state.split).next(0)
        pillow = None
        if part != "train":
            augment = resolve_augment(config.data, ours.setup.dataset)
            pillow = PillowLoader(config, ours.setup.dataset, ours.state.split, augment, workers)

        def baseline(
            part: str = part,
            theirs: Baseline = theirs,
            pillow: PillowLoader | None = pillow,
            resident: Batch = resident,
        ) -> None:
            batch = pillow.next(0) if pillow is not None else resident
            if part != "data":
                theirs.step(batch)

        def fast(part: str = part, ours: Trainer = ours) -> None:
            if part == "data":
                ours.loader.next(ours.step)
                ours.state.step += 1
            else:
                ours.train_step()

        sides: tuple[Callable[[], None], Callable[[], None]] = (baseline, fast)
        pairs = []
        for index in range(rounds):
            times = [0.0, 0.0]
            for side in (0, 1) if index % 2 == 0 else (1, 0):
                times[side] = turn(sides[side], part, steps, ranks.device)
            pairs.append(times)
        ours.close()
        if pillow is not None:
            pillow.close()
        ratios = [theirs_seconds / our_seconds for theirs_seconds, our_seconds in pairs]
        slow, quick = (statistics.median(times) for times in zip(*pairs, strict=True))
        row = {
            "recipe": name,
            "part": part,
            "baseline_views_per_second": round(ours.setup.views_per_step / slow, 1),
            "our_views_per_second": round(ours.setup.views_per_step / quick, 1),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_min": round(min(ratios), 2),
            "ratio_max": round(max(ratios), 2),
            "rounds": rounds,
            "steps": steps,
            "views_per_step": ours.setup.views_per_step,
            "model": config.model.name,
            "engine": config.distributed.engine,
            "precision": config.train.precision,
            "compile": config.train.compile,
            "loss": config.method.impl,
            "workers": workers + 1,
        }
        print(
            f"{name:14}{part:6} baseline {row['baseline_views_per_second']:>9,.0f} views/s   ours "
            f"{row['our_views_per_second']:>9,.0f}   {row['ratio']:.2f}x "
            f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
            flush=True,
        )
        yield row


def configured(name: str, device: str, folder: Path, overrides: list[str]) -> Config:
    recipe = RECIPES[name]
    changes = [f"device={device}", "log.progress=off", *recipe.overrides]
    if device == "cpu" and recipe.cpu_batch:
        batch, mu = recipe.cpu_batch
        changes += [f"data.batch_size={batch}", f"data.mu={mu}"]
    if recipe.pictures:
        labeled, unlabeled = write_pictures(folder)
        changes += [f"data.labeled={labeled}", f"data.unlabeled=[{unlabeled}]"]
    return load_config(recipe.config, [*changes, *overrides])


def main() -> int:
    parser = argparse.ArgumentParser(description="Ours against the usual PyTorch training.")
    parser.add_argument("--recipe", type=names_of(RECIPES), default=CPU_RECIPES, metavar="NAME,...")
    parser.add_argument("--part", type=names_of(WARM_UP), default=list(WARM_UP), metavar="PART,...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        help="timed steps of a turn (default 8, fewer of large networks on a CPU)",
    )
    parser.add_argument("--workers", type=int, help="of the baseline's unlabeled stream")
    parser.add_argument("--smoke", action="store_true", help="one round of one step, not kept")
    options, overrides = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    path = RESULTS / "end_to_end.csv"
    ranks = None
    rounds = 1 if options.smoke else options.rounds
    print("  ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.recipe:
            config = configured(name, options.device, Path(folder), overrides)
            if ranks is None:
                check_launch(config)
                ranks = start_ranks(config)
            workers = options.workers or (2 if options.smoke else cpu_cores())
            usual = RECIPES[name].cpu_steps if options.device == "cpu" else 8
            steps = 1 if options.smoke else options.steps or usual
            same_mathematics(config, ranks)
            for row in measure(name, config, ranks, options.part, rounds, steps, workers):
                rows.append(row)
                if not options.smoke:
                    write_table(path, [row], replace=("recipe", "part", "precision", "compile"))
    stop_ranks()
    if not options.smoke:
        save_bars(
            path.with_suffix(".png"),
            [f"{row['recipe']}\n{row['part']}" for row in rows],
            {"views per second over the baseline's": [row["ratio"] for row in rows]},
            title=f"Ours over the usual PyTorch training: {machine()['machine']}",
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
