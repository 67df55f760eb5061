"""TensorBoard, Weights & Biases and MLflow: numbers of a run besides `metrics.jsonl`.

None of them can end a run. A logger has three methods, which may raise anything:
`scalars(values, step)` adds finite numbers by name, `figure(path, step)` a PNG file, and
`close(finished)` writes what is left; `finished` is False where the run may go on later.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from simpro_fast.config import Config, flatten
from simpro_fast.distributed.signals import Preempted
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.file_schema import FileSchema, read_as
from simpro_fast.utils.printable import printable

logger = logging.getLogger(__name__)

IDS = "loggers.json"
"""In the run directory: what W&B and MLflow call this run, so that it goes on as the same one."""
START_SECONDS = 60
"""That W&B may take to start."""


class Ids(FileSchema):
    """The content of `loggers.json`."""

    wandb: str | None = None
    mlflow: str | None = None


class TensorBoardLog:
    """Events in `<run>/tensorboard`; those after `step`, of an earlier start, are hidden."""

    run_id = None

    def __init__(self, config: Config, run_dir: Path, step: int, run_id: str | None) -> None:
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

    def __init__(self, config: Config, run_dir: Path, step: int, run_id: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        self.run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=_name(config.log.wandb),
            id=self.run_id,
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


class MlflowLog:
    """An MLflow run, on the server of `MLFLOW_TRACKING_URI` or in `<output_dir>/mlruns`."""

    def __init__(self, config: Config, run_dir: Path, step: int, run_id: str | None) -> None:
        # A server that is gone must not hold up training for the library's own ten minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # a file store needs no database package, but a word since MLflow 3
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (config.output_dir / "mlruns").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        experiment = _name(config.log.mlflow)
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self._client.create_experiment(experiment)
        made = self._client.create_run(place, run_name=f"{config.name} seed {config.seed}")
        self.run_id = made.info.run_id
        self._send("params", 100, [Param(k, str(v)) for k, v in flatten(config).items()])

    def _send(self, kind: str, most: int, items: list[Any]) -> None:
        """The server takes at most so many items at once."""
        for first in range(0, len(items), most):
            self._client.log_batch(self.run_id, **{kind: items[first : first + most]})

    def scalars(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(_mlflow_name(k), value, now, step) for k, value in values.items()]
        self._send("metrics", 1000, rows)

    def figure(self, path: Path, step: int) -> None:
        self._client.log_artifact(self.run_id, str(path), "report")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")


RunLogger = TensorBoardLog | WandbLog | MlflowLog
KINDS: dict[str, tuple[type[RunLogger], str, str]] = {
    "tensorboard": (TensorBoardLog, "tensorboard", "report"),
    "wandb": (WandbLog, "wandb", "wandb"),
    "mlflow": (MlflowLog, "mlflow-skinny", "mlflow"),
}
"""Key in `log` -> class, package, and the extra that brings it. The key is the module's name."""


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
            except Preempted:  # a signal's, which only happened to arrive here
                raise
            except Exception as error:  # servers, disks and libraries fail in their own ways
                _warn(key, f"ends at step {step}", error)
                del self._by_key[key]


def check_packages(config: Config) -> None:
    """Find out before training, not after it, that something asked for cannot be made.

    Raises:
        UserError: naming the key, the package and the pip line.
    """
    wanted = [(key, key, *KINDS[key][1:]) for key in KINDS if getattr(config.log, key)]
    if config.log.figures:
        wanted += [("figures", name, name, "report") for name in ("matplotlib", "jinja2")]
    for key, module, package, extra in wanted:
        if importlib.util.find_spec(module) is None:
            raise _lacks(key, package, extra)


def start_loggers(
    config: Config, run_dir: Path, class_names: Sequence[str], step: int, *, fresh: bool
) -> Loggers:
    """All loggers of a run that stands at `step`; one that cannot start is a warning.

    Args:
        fresh: the run does not go on from a checkpoint, so it is a new one for W&B and MLflow.

    Raises:
        UserError: a package cannot be used.
    """
    path, ids = run_dir / IDS, dict[str, str]()
    if not fresh and path.is_file():
        with suppress(UserError):  # damaged: new runs then
            ids = read_as(path, Ids).model_dump(exclude_none=True)
    started: dict[str, RunLogger] = {}
    for key, (kind, package, extra) in KINDS.items():
        if not getattr(config.log, key):
            continue
        try:
            one = started[f"log.{key}"] = kind(config, run_dir, step, ids.get(key))
        except Preempted:
            raise
        except ImportError:  # not there, too old, or broken
            raise _lacks(key, package, extra) from None
        except Exception as error:
            _warn(f"log.{key}", "cannot start", error)
        else:
            if one.run_id:
                ids[key] = one.run_id
    if ids:
        write_json(path, ids)
    else:
        path.unlink(missing_ok=True)  # of an earlier start
    return Loggers(started, class_names)


def _mlflow_name(key: str) -> str:
    """ASCII, and slashes where a path may have them."""
    parts = key.split("/", 1)
    return "/".join(re.sub(r"[^\w\-. ]", "_", part, flags=re.ASCII) for part in parts)


def _name(value: bool | str) -> str:
    """Project of W&B or experiment of MLflow."""
    return "simpro_fast" if value is True else str(value)


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
