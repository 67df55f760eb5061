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
    "prepare": "check a data set before training, and write its manifest",
    "export": "write a trained network as ONNX, or as a folder for a model hub",
    "report": "table, figures and one page of any number of runs",
    "doctor": "check a machine or an allocation before training",
    "watch": "how a run stands: progress, estimated class distribution, accuracy, ranks",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `simpro-fast VERB ...`; returns the exit code of the verb, 2 without a known one."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        print("usage: simpro-fast VERB [...]\n")
        for name, summary in VERBS.items():
            print(f"  {name:<9} {summary}")
        print("\nsimpro-fast VERB --help lists the options of a verb.")
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


def run(verb: str, arguments: Sequence[str] | None = None) -> int:
    """Run one verb, by default with the arguments of this process; returns its exit code."""
    if verb == "train":
        end_on_signals()
    code: int = import_module(f"simpro_fast.cli.{verb}").main(arguments)
    return code
