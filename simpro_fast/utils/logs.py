"""Logging: which rank writes what to the terminal."""

from __future__ import annotations

import logging
import sys

from simpro_fast.utils.printable import printable

LOGGERS = ("simpro_fast", "simpro_kernels")
FOUND_BY_ALL = {"found_by_all": True}
"""`extra` of a warning that every rank finds out by itself: rank 0 alone shows it."""


class _OneLine(logging.Formatter):
    """The message alone; names in it cannot begin a line of their own."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage())


def log_to_terminal(is_main: bool) -> None:
    """Our own messages only: all that rank 0 has to say, and warnings that are another rank's."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_OneLine())
    if not is_main:
        handler.addFilter(lambda record: not getattr(record, "found_by_all", False))
    for name in LOGGERS:
        ours = logging.getLogger(name)
        ours.setLevel(logging.INFO if is_main else logging.WARNING)
        ours.handlers = [handler]  # not one more for every run in the same process
