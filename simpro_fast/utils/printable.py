"""Text from outside, on one line: names of files and classes, keys, what other programs say."""

from __future__ import annotations

from typing import Any, TextIO


def printable(text: object) -> str:
    """`str(text)` with everything that a terminal would act on written as an escape.

    Control characters (newline, ESC, carriage return), separators of lines, marks that turn the
    direction of writing and bytes that are no UTF-8 become `\\n`, `\\x1b`, `\\u202e`, `\\udcff`:
    no name can forge a line of output or colour it.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def printables(value: Any) -> Any:
    """The same structure of dictionaries and lists with every string, keys too, `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printables(key): printables(item) for key, item in value.items()}
    return [printables(item) for item in value] if isinstance(value, list) else value


def show(line: object, file: TextIO | None = None) -> None:
    """Print one line, by default on stdout, and at once."""
    print(printable(line), file=file, flush=True)
