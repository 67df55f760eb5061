"""Attack the system as its users' data, disks and schedulers would, and count what it survives.

`python -m tests.survival.attack [KIND ...]` runs the trials of all kinds, or of some, prints every
attempt that failed and a table (kind, tried, survived), and exits with 1 if any failed. The trials
are in `attack_*.py` beside this file; a kind of attack is one function:

    @trial("damaged pictures")
    def damaged_pictures(folder: Path) -> Iterator[Attempt]:
        yield Attempt("a JPEG cut in half", refused(lambda: prepare(folder), "half.jpg"))
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from simpro_fast.utils.errors import UserError
from tests import processes
from tests.processes import PATIENCE


@dataclass(frozen=True)
class Attempt:
    """One attack and how it ended."""

    what: str
    complaint: str | None
    """None: survived; otherwise what is wrong with the end, in a line."""


Trial = Callable[[Path], Iterable[Attempt]]
"""Makes its files in the empty folder that it is given, and yields its attempts."""

_TRIALS: dict[str, list[Trial]] = {}
_SLOW: set[str] = set()


def trial(kind: str, *, slow: bool = False) -> Callable[[Trial], Trial]:
    """Register a function as (part of) the trials of a kind.

    Args:
        slow: the kind takes more than some seconds, and is left to `make test-all`.
    """

    def register(function: Trial) -> Trial:
        _TRIALS.setdefault(kind, []).append(function)
        if slow:
            _SLOW.add(kind)
        return function

    return register


def trials() -> dict[str, list[Trial]]:
    """Kind to trials, of all modules `attack_*.py`."""
    for path in sorted(Path(__file__).parent.glob("attack_*.py")):
        import_module(f"tests.survival.{path.stem}")
    return _TRIALS


def is_slow(kind: str) -> bool:
    return kind in _SLOW


def refused(function: Callable[[], Any], *words: str) -> str | None:
    """Whether a call ends with the one-line error that a user can act on; else the complaint.

    Args:
        words: what the error must name.
    """
    try:
        function()
    except UserError as error:
        return wrong_line(str(error), *words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went through without an error"


def wrong_line(text: str, *words: str) -> str | None:
    """What is wrong with an error's text: not one printable line, or a word is missing."""
    if not text.isprintable():
        return f"not one printable line: {text!r}"
    missing = [word for word in words if word not in text]
    return f"{missing[0]!r} is missing in: {text}" if missing else None


def in_own_process(function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE) -> Any:
    """What a function of a module gives in a process of its own, which may crash.

    Args:
        function: its result is one of JSON.

    Raises:
        AssertionError: the process died; says how.
    """
    with tempfile.NamedTemporaryFile() as result:
        done = processes.run(_dump, result.name, function, *arguments, timeout=timeout)
        if done.returncode != 0:
            raise AssertionError(f"exit code {done.returncode}: {done.stderr[-500:]}")
        return json.load(result)


def _dump(result: str, function: Callable[..., Any], *arguments: Any) -> None:
    Path(result).write_text(json.dumps(function(*arguments)))


def attempts(function: Trial) -> Iterator[Attempt]:
    """All attempts of a trial in a folder of its own; an exception is a failed one."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield from function(Path(folder))
        except Exception as error:
            yield Attempt(
                function.__name__, f"the trial broke off, {type(error).__name__}: {error}"
            )


def main(arguments: list[str] | None = None) -> int:
    """Run the trials and print the table; 0 if everything was survived."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only these")
    kinds = parser.parse_args(arguments).kinds
    known = trials()
    for kind in kinds:
        if kind not in known:
            parser.error(f"no kind {kind!r}; known: {', '.join(known)}")
    lost = 0
    print("| kind | tried | survived |\n|---|---|---|")
    for kind in kinds or known:
        found = [attempt for function in known[kind] for attempt in attempts(function)]
        failed = [attempt for attempt in found if attempt.complaint is not None]
        lost += len(failed)
        print(f"| {kind} | {len(found)} | {len(found) - len(failed)} |", flush=True)
        for attempt in failed:
            print(f"NOT SURVIVED {kind}: {attempt.what}: {attempt.complaint}", file=sys.stderr)
    return int(lost > 0)


if __name__ == "__main__":
    from tests.survival import attack  # the module that the trials register with

    sys.exit(attack.main())
