"""Text from outside, on one line: names of files and classes, keys, what other programs say."""

from __future__ import annotations


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
