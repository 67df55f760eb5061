"""Where every command begins: `simpro-fast VERB ...` and `launch/`, for launchers.

Nothing heavy may be imported here: signals must be handled before the imports of seconds.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from simpro_fast.cli import ending
from simpro_fast.distributed.signals import end_on_signals, interrupt_ends
from simpro_fast.utils.printable import show


class Verb(NamedTuple):
    """A line of the overview: `simpro_fast.cli.<verb>.main` does it."""

    group: str
    summary: str
    example: str


VERBS = {
    "prepare": Verb(
        "before training",
        "check images, and write the list that training reads",
        "--labeled photos/labeled --unlabeled photos/others --output prepared",
    ),
    "doctor": Verb(
        "before training",
        "check a machine or an allocation",
        "--config photos.yaml",
    ),
    "embed": Verb(
        "before training",
        "features of every image by a pretrained network, to train a head in seconds",
        "photos.yaml --output features",
    ),
    "train": Verb(
        "training",
        "train a network; launch/train.py under deepspeed or torchrun",
        "digits_lt/reversed train.steps=200",
    ),
    "keys": Verb(
        "training",
        "the keys of the configuration: type, default, meaning",
        "optim",
    ),
    "watch": Verb(
        "training",
        "a table of runs while they train, redrawn every few seconds",
        "runs/digits_lt",
    ),
    "report": Verb(
        "runs",
        "table (also in Markdown, LaTeX, CSV), figures and one page of any number of runs",
        "runs/digits_lt",
    ),
    "evaluate": Verb(
        "a trained network",
        "accuracy and calibration on images with known classes",
        "runs/photos/seed1 photos/val",
    ),
    "predict": Verb(
        "a trained network",
        "classify images: files, folders, tar shards, lists",
        "runs/photos/seed1 photos/unlabeled --output photos.csv",
    ),
    "shares": Verb(
        "a trained network",
        "class shares of unlabeled images, with intervals",
        "runs/photos/seed1 photos/unlabeled --calibrate photos/val",
    ),
    "pseudo": Verb(
        "a trained network",
        "pseudo-labels of a run's unlabeled images, and which to label next",
        "runs/photos/seed1 --queue 100",
    ),
    "export": Verb(
        "a trained network",
        "write it as ONNX, or as a folder for a model hub",
        "runs/photos/seed1 --onnx photos.onnx",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `simpro-fast VERB ...`; returns the exit code of the verb, 2 without a known one."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "--version"):
        return _about([verb])
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(VERBS)}"
        show(f"error: unknown verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    return run(verb, words[1:])


@ending.verb
def _about(words: Sequence[str] | None) -> int:
    print(f"simpro_fast {version('simpro_fast')}" if words == ["--version"] else _overview())
    return ending.DONE


def _overview() -> str:
    lines, group = ["usage: simpro-fast VERB [...]"], ""
    for name, verb in VERBS.items():
        if verb.group != group:
            group = verb.group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<9} {verb.summary}")
        lines.append(f"{'':<11} simpro-fast {name} {verb.example}")
    lines.append(
        "\nsimpro-fast VERB --help explains a verb, docs/tutorial_digits.md shows them in use."
    )
    return "\n".join(lines)


def run(verb: str, arguments: Sequence[str] | None = None) -> int:
    """Run one verb, by default with the arguments of this process; returns its exit code."""
    # Pillow's remarks on odd tags, one a file. In the process of a command, not in a host's.
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
    if verb == "train":
        end_on_signals()
    with interrupt_ends():
        module = import_module(f"simpro_fast.cli.{verb}")
    code: int = module.main(arguments)
    return code
