"""Interface of the loggers, and the guard that keeps their troubles away from training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from simpro_fast.distributed.stop_requests import Preempted
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.printable import printable

logger = logging.getLogger(__name__)


class RunLogger(Protocol):
    """One place besides `metrics.jsonl` where numbers of a run go. Methods may raise anything."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add finite numbers, by name, as they are after `step` steps."""

    def figure(self, path: Path, step: int) -> None:
        """Add a PNG file."""

    def close(self, *, finished: bool) -> None:
        """Write what is left.

        Args:
            finished: False where the run ends before its last step, and may go on later.
        """


class Loggers:
    """All loggers of a run, on rank 0; none of them can end it.

    Args:
        by_key: logger by its configuration key.
        class_names: of the entries of per-class values.
    """

    def __init__(
        self, by_key: dict[str, RunLogger] | None = None, class_names: Sequence[str] = ()
    ) -> None:
        self._by_key = dict(by_key or {})
        self._class_names = class_names

    def write(self, row: dict[str, Any]) -> None:
        """Add a row of metrics: its numbers, and its per-class lists as one number per class."""
        values, step = scalars_of(row, self._class_names), row["step"]
        self._each(lambda one: one.scalars(values, step), step)

    def figures(self, paths: Sequence[Path], step: int) -> None:
        """Add figures; PNG files."""
        for path in paths:
            self._each(lambda one, path=path: one.figure(path, step), step)  # type: ignore[misc]

    def close(self, step: int, *, finished: bool) -> None:
        """Write what is left; harmless when repeated."""
        self._each(lambda one: one.close(finished=finished), step)
        self._by_key.clear()

    def _each(self, act: Callable[[RunLogger], None], step: int) -> None:
        for key, one in list(self._by_key.items()):
            try:
                act(one)
            except Preempted:  # a signal's, which only happened to arrive here
                raise
            except Exception as error:  # servers, disks and libraries fail in their own ways
                warn(key, f"ends at step {step}", error)
                del self._by_key[key]


def warn(key: str, what: str, error: Exception) -> None:
    """The one line about a logger that has failed."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    logger.warning("%s %s, training goes on: %s", key, what, said)


def lacks(key: str, package: str, extra: str = "report") -> UserError:
    """The error where `key` asks for a package of an extra that cannot be used."""
    return UserError(f"{key} needs {package}: {pip_line(extra)}; or set {key}=false")


def scalars_of(row: dict[str, Any], class_names: Sequence[str]) -> dict[str, float]:
    """Name to value of all finite numbers in a row of metrics.

    A list with one entry per class becomes `<key>/<k> <class name>`.
    """
    width = len(str(max(len(class_names) - 1, 0)))
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list) and len(value) == len(class_names):
            for k, (name, entry) in enumerate(zip(class_names, value, strict=True)):
                found[f"{key}/{k:0{width}d} {printable(name)}"] = entry
        elif key != "step":
            found[key] = value
    numbers = {k: v for k, v in found.items() if isinstance(v, int | float)}
    return {k: float(v) for k, v in numbers.items() if math.isfinite(v)}
