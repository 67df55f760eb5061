"""What a step of each method costs over one of SimPro: operators counted, processor time in pairs.

    python bench/bench_methods.py [--method acr,simpro] [--rounds 30] [key.sub=value ...]

All methods run the same network on the same resident batch, each in its last phase. In every round
each takes one step, in turn, so that what else the machine does falls on all of them alike; shown
is each method's processor time of all rounds over that of SimPro, since some work at every few
steps only, and the 20th and 80th percentile of the ratio in a round.
Operators are those that torch dispatches in a step, backward and optimizer included. Rows go to
bench/results/methods.csv; nothing is kept with --smoke.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from common import RESULTS, names_of, write_table
from torch.utils._python_dispatch import TorchDispatchMode

from simpro_fast.config import load_config
from simpro_fast.config.methods import METHODS
from simpro_fast.data.pipeline.synthetic_loader import SyntheticLoader
from simpro_fast.distributed.environment import check_launch
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError

BASE = "simpro"
WARM_UP = 3
PERIODS = 3
# Short periods, so that all phases are over after a few steps; a threshold that most images pass.
COMMON = (
    *("train.period=1", f"train.steps={100 * PERIODS}", "method.threshold=0.2"),
    *("distributed.engine=plain", "log.progress=off"),
)


# All phases are over after `PERIODS`; none begins while steps are timed.
LAST_PHASE: dict[str, dict[str, Any]] = {
    "simpro_star": {"anchor_after": 1},
    "acr": {"estimate_after": 0},
    "acr_no_anchors": {"estimate_after": 0},
    "cdmad": {"correct_after": 0.0},
    "daso": {"warmup": 1, "window": 2},
    "crest_plus": {"generations": 2},
    "darp": {"refine_after": 0.0, "refine_every": 10},
    "adello": {"distill_after": 0.0},
    "cossl": {"cotrain_after": 0.0},
    "cpg": {"warmup": 1, "window": 10**6},
    "ccl": {"estimate_after": 0},
}


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def in_last_phase(source: str, name: str, overrides: list[str]) -> Trainer:
    """A trainer of this method after `PERIODS` periods of one step."""
    early = [f"method.{key}={value}" for key, value in LAST_PHASE.get(name, {}).items()]
    config = load_config(source, [f"method.name={name}", *COMMON, *early, *overrides])
    check_launch(config)
    trainer = Trainer(config, start_ranks(config), make_loader=SyntheticLoader, write=False)
    for _ in range(PERIODS):
        trainer.train_step()
        trainer.algorithm.method.end_period()
    return trainer


def measure(
    source: str, names: list[str], rounds: int, overrides: list[str]
) -> list[dict[str, Any]]:
    trainers = {name: in_last_phase(source, name, overrides) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        for name, trainer in trainers.items():
            started = time.process_time()
            trainer.train_step()
            if turn >= WARM_UP:
                seconds[name].append(time.process_time() - started)
    rows = []
    for name, trainer in trainers.items():
        with CountOperators() as counter:
            trainer.train_step()
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds[BASE], strict=True))
        rows.append(
            {
                "method": name,
                "config": trainer.setup.config.name,
                "views": trainer.setup.views_per_step,
                "operators": counter.number,
                "cpu_ms": round(1e3 * statistics.median(seconds[name]), 2),
                "over_simpro": round(sum(seconds[name]) / sum(seconds[BASE]), 3),
                "ratio_p20": round(ratios[len(ratios) // 5], 3),
                "ratio_p80": round(ratios[-1 - len(ratios) // 5], 3),
                "rounds": rounds,
            }
        )
        trainer.close()
    stop_ranks()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the cost of a step between methods.")
    parser.add_argument("--config", default="fashion_mnist_lt/reversed")
    parser.add_argument("--method", type=names_of(list(METHODS)), default=tuple(METHODS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="two rounds, nothing kept")
    options, overrides = parser.parse_known_args()
    names = [BASE, *(name for name in options.method if name != BASE)]
    try:
        rows = measure(options.config, names, 2 if options.smoke else options.rounds, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for row in rows:
        print(
            f"{row['method']:16}{row['operators']:6} operators{row['cpu_ms']:9.1f} ms"
            f"{row['over_simpro']:8.3f} ({row['ratio_p20']} to {row['ratio_p80']}) of SimPro"
        )
    if not options.smoke:
        write_table(RESULTS / "methods.csv", rows, replace=("method", "config"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
