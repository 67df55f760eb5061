"""Attacks by checkpoints: damaged ones, and whole ones that are not what they should be."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simpro_fast.config import Config, parse_config
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.run.checkpoint import list_checkpoints, newest_whole
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.logs import log_to_terminal
from tests.conftest import TINY
from tests.equality import assert_bit_equal
from tests.survival.attack import Attempt, trial
from tests.training.test_resume import WRONG, spoil


def _config(folder: Path, **changes: Any) -> Config:
    tree = {**TINY, "output_dir": str(folder / "runs")}
    for key, value in changes.items():
        tree[key] = {**TINY.get(key, {}), **value}
    return parse_config(tree)


def _complaint(check: Callable[[], object]) -> str | None:
    """What a check that should pass says otherwise."""
    try:
        check()
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _train(config: Config, steps: int) -> int:
    """Train up to a step and save every second one; returns the step it went on from."""
    log_to_terminal(False)
    trainer = Trainer(config, start_ranks(config))
    try:
        begun = trainer.step
        while trainer.step < steps:
            trainer.train_step()
            if trainer.step % 2 == 0:
                trainer.save()
        return begun
    finally:
        trainer.close()
        stop_ranks()


@trial("damaged checkpoints", slow=True)
def damaged_checkpoints(folder: Path) -> Iterator[Attempt]:
    config = _config(folder)
    _train(config, 4)
    newest, before = list_checkpoints(config.run_dir / "checkpoints")
    whole, noise = newest.read_bytes(), random.Random(0)
    states = {newest: newest_whole(before.parent), before: newest_whole(before.parent, below=4)}
    for number in range(200):
        content = bytearray(whole)
        kind = ("a flipped bit", "cut", "a block of zeros")[number % 3]
        place = noise.randrange(len(content))
        if kind == "cut":
            content = content[:place]
        elif kind == "a flipped bit":
            content[place] ^= 1 << noise.randrange(8)
        else:
            content[place : place + 4096] = bytes(len(content[place : place + 4096]))
        newest.write_bytes(content)

        def same() -> None:
            found = newest_whole(newest.parent)
            assert found is not None
            wanted = states[found[0]]
            assert wanted is not None
            assert_bit_equal(found[1], wanted[1], "state")

        yield Attempt(f"{kind} at {place}", _complaint(same))


@trial("checkpoints that can be read but are wrong")
def wrong_checkpoints(folder: Path) -> Iterator[Attempt]:
    made = _config(folder / "made")
    _train(made, 4)
    for number, (what, change) in enumerate(WRONG.items()):
        config = _config(folder / str(number))
        shutil.copytree(made.run_dir, config.run_dir)
        spoil(config, change)

        def goes_on(config: Config = config) -> None:
            begun = _train(config, 2)
            assert begun == 2, f"it went on from step {begun}"

        yield Attempt(what, _complaint(goes_on))
