"""What users of other programs mean by a flag that is a configuration key here."""

from __future__ import annotations

import textwrap

from simpro_fast.config import Config
from simpro_fast.config.methods import METHODS

# Given to the script they would silently start something smaller than was asked for.
_LAUNCHER_FLAGS = {
    *("hostfile", "num-gpus", "num-nodes", "include", "exclude", "no-ssh"),
    *("node-rank", "nnodes", "nproc-per-node", "master-addr", "master-port"),
}
_RESUME_FLAGS = {"resume", "continue", "restart", "resume-from"}
_GPUS = {"gpus", "gpu", "devices", "world-size", "ngpus"}


def hint(argument: str) -> str | None:
    """The end of the line about an unknown flag, or None where nothing is known about it."""
    flag, equals, value = argument.lstrip("-").partition("=")
    name = flag.lower().replace("_", "-")
    if name in _LAUNCHER_FLAGS:
        return "; it is the launcher's, and belongs before launch/train.py"
    if name in _RESUME_FLAGS:
        return (
            "; the same command goes on by itself from the newest checkpoint, "
            "see checkpoint.resume=auto|none|PATH"
        )
    if name in _GPUS:
        return "; ranks are the launcher's: deepspeed --num_gpus N launch/train.py ..."
    if key := _key(name):
        return f"; it is a configuration key, without dashes: {key}={value or '...'}"
    if equals:
        return f"; configuration keys have no dashes: {argument.lstrip('-')}"
    return None


def known_keys() -> list[str]:
    """All keys, those of every method among them."""
    own = [f"method.{key}" for entry in METHODS.values() for key in entry.keys.own_keys()]
    return list(dict.fromkeys([*Config.changes(), *own]))


def key_lines() -> list[str]:
    """All keys of the configuration, section by section, for `--help`."""
    sections: dict[str, list[str]] = {}
    for dotted in known_keys():
        section, _, key = dotted.rpartition(".")
        sections.setdefault(section, []).append(key)
    lines = []
    for section, keys in sections.items():
        start = f"  {section}: " if section else "  "
        lines += textwrap.wrap(" ".join(keys), 96, initial_indent=start, subsequent_indent="      ")
    return lines


def _key(name: str) -> str | None:
    keys = known_keys()
    dotted = [key for key in keys if key.replace("_", "-") == name]
    ends = [key for key in keys if key.rpartition(".")[2].replace("_", "-") == name]
    return next(iter(dotted + ends), None)
