"""TensorBoard and Weights & Biases: numbers of a run besides `metrics.jsonl`.

None of them can end a run. A logger has three methods, which may raise anything:
`scalars(values, step)` adds finite numbers by name, `figure(path, step)` a PNG file, and
`close(finished)` writes what is left; `finished` is False where the run may go on later.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from simpro_fast.config import Config, flatten
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.printable import printable

logger = logging.getLogger(__name__)

WANDB_ID = "wandb_id"
"""In the run directory: what W&B calls this run, so that it goes on as the same one."""
START_SECONDS = 60
"""That W&B may take to start."""


class TensorBoardLog:
    """Events in `<run>/tensorboard`; those after `step`, of an earlier start, are hidden."""

    def __init__(self, config: Config, run_dir: Path, step: int, fresh: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # It hides the events of this step, too, which stay true where a run goes on.
        purge = step + 1 if step else 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def figure(self, path: Path, step: int) -> None:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(f"report/{path.stem}", pixels, step, dataformats="HWC")

    def close(self, finished: bool) -> None:
        self._writer.close()


class WandbLog:
    """A W&B run, online or (`WANDB_MODE=offline`) in files of `<run>/wandb`.

    Numbers, figures and the configuration are sent; neither the command line nor code, commits or
    the machine's state. Login, entity and mode come from the environment (`WANDB_API_KEY`, ...).
    """

    def __init__(self, config: Config, run_dir: Path, step: int, fresh: bool) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        path = run_dir / WANDB_ID
        if fresh or not path.is_file():
            write_atomically(path, secrets.token_hex(4))
        self._run = wandb.init(
            project="simpro_fast" if config.log.wandb is True else str(config.log.wandb),
            id=path.read_text(encoding="utf-8"),
            resume="allow",
            name=f"{config.name} seed {config.seed}",
            group=config.name.replace("/", "."),
            dir=str(run_dir),
            config=flatten(config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=START_SECONDS,
                login_timeout=1,  # nobody is asked anything while ranks wait
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,  # it holds the command line
                x_disable_stats=True,
            ),
        )
        # Its own count must never fall, and a run that goes on may begin before its last row.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def figure(self, path: Path, step: int) -> None:
        self._run.log({f"report/{path.stem}": self._wandb.Image(str(path)), "step": step})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


RunLogger = TensorBoardLog | WandbLog
KINDS: dict[str, tuple[type[RunLogger], str]] = {
    "tensorboard": (TensorBoardLog, "report"),
    "wandb": (WandbLog, "wandb"),
}
"""Key in `log`, which is the package's name -> class, and the extra that brings it."""


class Loggers:
    """All loggers of a run, on rank 0; one that fails is a warning, and off.

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
        self._each(lambda one: one.close(finished), step)
        self._by_key.clear()

    def _each(self, act: Callable[[RunLogger], None], step: int) -> None:
        for key, one in list(self._by_key.items()):
            try:
                act(one)
            except Exception as error:  # servers, disks and libraries fail in their own ways
                _warn(key, f"ends at step {step}", error)
                del self._by_key[key]


def check_packages(config: Config) -> None:
    """Find out before training, not after it, that something asked for cannot be made.

    Raises:
        UserError: naming the key, the package and the pip line.
    """
    wanted = [(key, key, extra) for key, (_, extra) in KINDS.items() if getattr(config.log, key)]
    if config.log.figures:
        wanted += [("figures", name, "report") for name in ("matplotlib", "jinja2")]
    for key, package, extra in wanted:
        if importlib.util.find_spec(package) is None:
            raise _lacks(key, package, extra)


def start_loggers(
    config: Config, run_dir: Path, class_names: Sequence[str], step: int, *, fresh: bool
) -> Loggers:
    """All loggers of a run that stands at `step`; one that cannot start is a warning.

    Args:
        fresh: the run does not go on from a checkpoint, so it is a new one for W&B.

    Raises:
        UserError: a package cannot be used.
    """
    started: dict[str, RunLogger] = {}
    for key, (kind, extra) in KINDS.items():
        if getattr(config.log, key):
            try:
                started[f"log.{key}"] = kind(config, run_dir, step, fresh)
            except ImportError:  # not there, too old, or broken
                raise _lacks(key, key, extra) from None
            except Exception as error:
                _warn(f"log.{key}", "cannot start", error)
    return Loggers(started, class_names)


def _warn(key: str, what: str, error: Exception) -> None:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    logger.warning("%s %s, training goes on: %s", key, what, said)


def _lacks(key: str, package: str, extra: str) -> UserError:
    return UserError(f"log.{key} needs {package}: {pip_line(extra)}; or set log.{key}=false")


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
