"""Kill a run of two ranks with SIGKILL again and again; it must end as if nothing had happened.

`python -m tests.distributed.chaos --kills 20 --log bench/results/chaos.md` does it by hand and
writes down what happened.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from simpro_fast.config import Config, parse_config
from simpro_fast.run.checkpoint import list_checkpoints, step_of
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import git_commit
from tests.conftest import TINY
from tests.distributed.command_ranks import CommandRanks, half_written, newest_step
from tests.distributed.outcomes import outcome


@dataclass(frozen=True)
class Kill:
    """One end of the run before its time."""

    into_save: bool
    """Aimed at the moment when a checkpoint is being written."""
    delay: float
    """Otherwise: seconds after a checkpoint."""
    newest: int
    """Step of the newest checkpoint after it."""
    half_written: int
    """Temporary files of a save that the kill has cut short."""
    damaged: bool
    """The newest checkpoint was cut in half afterwards."""


def kill_repeatedly(
    config: Config, folder: Path, kills: int, *, seed: int, damage: tuple[int, ...] = ()
) -> list[Kill]:
    """Start the run, kill all its ranks at a seeded moment, start it again, and so on to its end.

    Every second kill waits for a checkpoint to be half-written, as far as that can be hit.

    Args:
        config: saves often; at least four steps for every kill.
        folder: for the output of every start.
        damage: numbers of the kills after which the newest checkpoint is cut in half.

    Raises:
        AssertionError: a start did not go on from the newest whole checkpoint, or did not end well.
    """
    generator = random.Random(seed)
    done: list[Kill] = []
    expected, bad = 0, ""
    stride = config.train.steps // (kills + 1)
    for number in range(kills):
        ranks = CommandRanks(config, folder / f"start{number}")
        ranks.wait_for_checkpoint(max((number + 1) * stride, expected + 1))
        into_save, delay = number % 2 == 1, generator.uniform(0.0, 0.2)
        if into_save:
            ranks.wait_for_save()
        else:
            time.sleep(delay)
        ranks.kill()
        _check_start(ranks, expected, bad)
        # A third is left by a kill between the new file and the removal of the oldest.
        newest, before, *_ = list_checkpoints(config.run_dir / "checkpoints")
        half, bad = len(half_written(config)), ""
        if number in damage:
            newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
            bad = newest.name
        done.append(Kill(into_save, delay, step_of(newest), half, bool(bad)))
        expected = step_of(before if bad else newest)
    ranks = CommandRanks(config, folder / "last")
    assert ranks.wait() == [0, 0], ranks.output()
    _check_start(ranks, expected, bad)
    return done


def _check_start(ranks: CommandRanks, step: int, bad: str) -> None:
    """It went on from `step`, and named the damaged file, if there was one."""
    text = f"at step {step}" if step else "starting fresh"
    assert text in ranks.output(0, "out"), f"{text}?\n{ranks.output()}"
    assert f"{bad} is damaged" in ranks.output(0, "out") or not bad, ranks.output()


def chaos_config(folder: Path, name: str, steps: int, every: int) -> Config:
    return parse_config(
        {
            **TINY,
            "name": name,
            "output_dir": str(folder),
            "train": {**TINY["train"], "steps": steps},
            "checkpoint": {"every": every},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    steps = 4 * (options.kills + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unbroken = chaos_config(folder, "unbroken", steps, steps)
        ranks = CommandRanks(unbroken, folder / "unbroken")
        assert ranks.wait() == [0, 0], ranks.output()
        config = chaos_config(folder, "killed", steps, 1)
        kills = kill_repeatedly(
            config,
            folder / "killed",
            options.kills,
            seed=options.seed,
            damage=(options.kills // 2, options.kills - 1),
        )
        assert newest_step(config) == steps
        outcome(unbroken).assert_equal(outcome(config))
    options.log.write_text(_report(kills, steps, options.seed))
    print(options.log.read_text())
    return 0


def _report(kills: list[Kill], steps: int, seed: int) -> str:
    rows = [
        f"| {n} | {'while saving' if k.into_save else f'{1000 * k.delay:.0f} ms after a save'} "
        f"| {k.newest} | {k.half_written} "
        f"| {'cut in half' if k.damaged else ''} |"
        for n, k in enumerate(kills, start=1)
    ]
    lines = [
        "# Two ranks killed with SIGKILL",
        "",
        f"{len(kills)} kills of a run of {steps} steps that saves after every step, seed {seed}. "
        "Every start went on from the newest whole checkpoint. Weights, EMA, "
        "optimizer, priors, counts and metrics at the end: bit-equal to those of an unbroken run.",
        "",
        f"{machine_name()}; torch {torch.__version__}; commit {git_commit()}; "
        f"`python -m tests.distributed.chaos {' '.join(sys.argv[1:])}`",
        "",
        "| kill | aimed | newest checkpoint, step | half-written files left | then |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
