"""Runs what a page of docs/ shows: its commands and its Python, block after block."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import simpro_fast
from simpro_fast.answers.estimation import bayesian
from simpro_fast.cli.entry import main
from tests import processes
from tests.conftest import ROOT
from tests.processes import PATIENCE

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SMALL = ("train.threads=1", "log.tensorboard=false", "log.progress=off", "log.figures=false")


def run_page(
    name: str,
    folder: Path,
    *,
    training: Sequence[str] = (),
    before: Callable[[str], None] = lambda block: None,
) -> dict[str, str]:
    """Run the blocks of `docs/<name>` in `folder`, as a reader would from top to bottom.

    Blocks without a language are commands, one a line; ```python is run, or written to the file
    that its first line names (`# my_data.py`); ```text is what a command prints.

    Args:
        training: overrides that make the page's trainings small.
        before: called with every block first, for what the page leaves to its reader.

    Returns:
        what each command and each block of Python printed.
    """
    said: dict[str, str] = {}
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for language, block in BLOCK.findall(page):
        before(block)
        if language == "python":
            file = re.match(r"# (\w+\.py)\n", block)
            if file:
                (folder / file[1]).write_text(block)
            else:
                said[block] = _run(folder, _python, block, (*SMALL, *training))
        elif not language:
            said |= run_commands(block, folder, training=training)
        else:
            assert language in ("text", "yaml"), f"{name}: what is a block of {language}?"
    assert said, f"{name} shows nothing that runs"
    return said


def run_commands(block: str, folder: Path, *, training: Sequence[str] = ()) -> dict[str, str]:
    """Run commands, one a line, in `folder`; returns what each printed."""
    lines = block.replace("\\\n", " ").splitlines()
    return {line: _run(folder, _command, line, (*SMALL, *training)) for line in lines}


def _run(folder: Path, function: Callable[..., object], text: str, *arguments: object) -> str:
    done = processes.run(function, text, *arguments, folder=folder, timeout=PATIENCE)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


def _python(code: str, training: Sequence[str]) -> None:
    train, simpro_fast.train = simpro_fast.train, lambda *words: train(*words, *training)
    sys.path.insert(0, ".")
    exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})


def _command(line: str, training: Sequence[str]) -> None:
    bayesian._MOST_DRAWS = 1000  # chains of a network that has learnt so little agree late
    words = shlex.split(
        line.replace("deepspeed launch/train.py", "simpro-fast train"), comments=True
    )
    if words[0].startswith("PYTHONPATH="):
        sys.path.insert(0, words.pop(0).partition("=")[2])
    assert words[0] == "simpro-fast", line
    verb, arguments = words[1], words[2:]
    if verb == "train" and "--print-config" not in arguments:
        arguments += training
    sys.exit(main([verb, *arguments]))
