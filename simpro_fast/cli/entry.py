"""Where every command begins: `simpro-fast VERB ...` and the scripts in `launch/`.

Nothing heavy may be imported here: signals must be handled before the imports of seconds.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from simpro_fast.fault_tolerance.early_signals import end_on_signals
from simpro_fast.printable import show

VERBS = {
    "train": "train a network (under deepspeed, torchrun or python: launch/train.py)",
    "predict": "classify images: files, folders, tar shards, lists",
    "pseudo": "pseudo-labels of a run's unlabeled images, and which to label next",
    "evaluate": "accuracy and calibration on images with known classes",
    "heap": "class shares of a heap of images, with intervals",
    "prepare": "check a data set before training, and write its manifest",
    "export": "write a trained network as ONNX, or as a folder for a model hub",
    "report": "table, figures and one page of any number of runs",
    "doctor": "check a machine or an allocation before training",
    "table": "train configurations x methods x seeds, and tabulate them in Markdown and LaTeX",
    "watch": "how a run stands: progress, estimated class distribution, accuracy, ranks",
}

GROUPS = {
    "before training": ("prepare", "doctor"),
    "training": ("train", "watch"),
    "runs": ("report", "table"),
    "a trained network": ("evaluate", "predict", "heap", "pseudo", "export"),
}
EXAMPLES = {
    "prepare": "--labeled photos/labeled --unlabeled photos/heap --output prepared",
    "doctor": "--config photos.yaml",
    "train": "digits_lt/reversed train.steps=200",
    "watch": "runs/digits_lt/reversed/seed1",
    "report": "runs/digits_lt/reversed/seed1",
    "table": "runs",
    "evaluate": "runs/photos/seed1 photos/val",
    "predict": "runs/photos/seed1 photos/heap --output heap.csv",
    "heap": "runs/photos/seed1 photos/heap --calibrate photos/val",
    "pseudo": "runs/photos/seed1 --queue 100",
    "export": "runs/photos/seed1 --onnx photos.onnx",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `simpro-fast VERB ...`; returns the exit code of the verb, 2 without a known one."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        print(_overview())
        return 0
    if verb == "--version":
        print(f"simpro_fast {version('simpro_fast')}")
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(VERBS)}"
        show(f"error: unknown verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    return run(verb, words[1:])


def _overview() -> str:
    lines = ["usage: simpro-fast VERB [...]"]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            if name in VERBS:
                lines.append(f"  {name:<9} {VERBS[name]}")
                lines.append(f"{'':<11} simpro-fast {name} {EXAMPLES[name]}")
    lines.append(
        "\nsimpro-fast VERB --help explains a verb; docs/tutorial_digits.md shows them all."
    )
    return "\n".join(lines)


def run(verb: str, arguments: Sequence[str] | None = None) -> int:
    """Run one verb, by default with the arguments of this process; returns its exit code."""
    if verb == "train":
        end_on_signals()
    code: int = import_module(f"simpro_fast.cli.{verb}").main(arguments)
    return code
