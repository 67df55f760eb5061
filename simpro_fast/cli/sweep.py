"""The members of a sweep: every combination of `--grid` values and `--seeds`.

    simpro-fast train --config digits_lt/reversed --grid method.tau=1,2 --seeds 1,2,3

A member is an ordinary run. Its name is `<name>/<key>-<value>/...`, one folder per grid key in
alphabetical order, so it depends on its own values alone: a grid may grow, and what was trained
before stays where it is.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpro_fast.cli.parser import CommandParser
from simpro_fast.config import Config, flatten, load_config
from simpro_fast.config.load import read_values, written_value
from simpro_fast.utils.errors import ConfigError

TRAIN = (sys.executable, "-m", "simpro_fast", "train")
_PLACES = ("name", "output_dir", "seed")
_LONGEST = 60


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    source: str
    """What `--config` says."""
    overrides: tuple[str, ...]
    config: Config

    def __str__(self) -> str:
        return f"{self.config.name} seed {self.config.seed}"

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def command(self, launcher: Sequence[str]) -> list[str]:
        """What trains it."""
        return [*launcher, "--config", self.source, *self.overrides]


def add_sweep_flags(parser: CommandParser) -> None:
    """The flags of a sweep."""
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="train with each of these values, one after another; repeat it for their product",
    )
    parser.add_argument("--seeds", metavar="1,2,3", help="train every run with each of these seeds")
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="what starts one run of a sweep, before its arguments; for example "
        "'deepspeed --num_gpus 8 launch/train.py' (default: plain python)",
    )
    parser.add_argument(
        "--print-commands",
        action="store_true",
        help="print the commands of the runs that are not finished, one per line, and exit",
    )


def wants_sweep(options: argparse.Namespace) -> bool:
    return bool(options.grid or options.seeds or options.launcher or options.print_commands)


def launcher_of(options: argparse.Namespace) -> list[str]:
    """Words of `--launcher`.

    Raises:
        ConfigError: it is empty, or a quote is missing.
    """
    if options.launcher is None:
        return list(TRAIN)
    try:
        words = shlex.split(options.launcher)
    except ValueError as error:
        raise ConfigError(f"--launcher {options.launcher}: {error}") from None
    if not words:
        raise ConfigError("--launcher is empty; for example 'deepspeed launch/train.py'")
    return words


def members_of(
    source: str, grids: Sequence[str], seeds: str | None, overrides: Sequence[str]
) -> list[Member]:
    """All members, every one of them validated; those of the first seed come first.

    Args:
        source: the configuration.
        grids: `key=a,b,c` each.
        seeds: `1,2,3`; None: that of the configuration.
        overrides: `key.sub=value` for all of them.

    Raises:
        ConfigError: a key or a value is wrong, or two members would be the same run.
    """
    axes = dict(sorted(_axis(item) for item in grids))
    if len(axes) < len(grids):
        raise ConfigError("--grid names a key twice; give all its values at once")
    for key in [*axes, *(["seed"] if seeds else [])]:
        if any(item.startswith(f"{key}=") for item in overrides):
            flag = "--seeds" if key == "seed" else "--grid"
            raise ConfigError(f"{key} is given by {flag} and as {key}=...; keep one")
    members, found = [], set()
    for seed in _seeds(seeds):
        for values in itertools.product(*axes.values()):
            member = _member(source, dict(zip(axes, values, strict=True)), seed, overrides)
            if member.run_dir in found:
                raise ConfigError(f"two runs of the sweep are {member}; leave one value out")
            found.add(member.run_dir)
            members.append(member)
    return members


def _axis(item: str) -> tuple[str, list[Any]]:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"--grid {item} must look like key.sub=a,b,c")
    if key in _PLACES:
        cure = "use --seeds" if key == "seed" else "every run of a sweep has a name of its own"
        raise ConfigError(f"--grid {key}=...: {cure}")
    values = read_values(f"--grid {key}", text)
    if not values:
        raise ConfigError(f"--grid {key}= has no value; give one or more: {key}=a,b,c")
    return key, values


def _seeds(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    seeds = read_values("--seeds", text)
    if not seeds or not all(isinstance(seed, int) and seed is not True for seed in seeds):
        raise ConfigError(f"--seeds {text} must be whole numbers such as 1,2,3")
    return list(seeds)


def _member(
    source: str, values: dict[str, Any], seed: int | None, overrides: Sequence[str]
) -> Member:
    chosen = [f"{key}={written_value(value)}" for key, value in values.items()]
    chosen += [] if seed is None else [f"seed={seed}"]
    config = load_config(source, [*overrides, *chosen])
    resolved = flatten(config)
    if wrong := [key for key in values if key not in resolved]:
        raise ConfigError(f"--grid {wrong[0]} is a section; name one of its keys")
    if values:
        name = "/".join([config.name, *(folder_name(key, resolved[key]) for key in values)])
        overrides = [item for item in overrides if not item.startswith("name=")]
        chosen.append(f"name={name}")
        config = load_config(source, [*overrides, *chosen])
    return Member(source, (*overrides, *chosen), config)


def folder_name(key: str, value: Any) -> str:
    """`<key>-<value>`, within what a run's name may hold.

    Keys have no dash, so the first one ends the key. A value that cannot stand in a name as it is
    ends in a part of its digest.
    """
    text = value_text(value)
    shown = re.sub(r"[^A-Za-z0-9._-]+", ".", text).strip(".")[:_LONGEST]
    if shown != text or not text:
        shown += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{key}-{shown}"


def value_text(value: Any) -> str:
    """A value of a configuration for people: 1 and not 1.0, words without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
