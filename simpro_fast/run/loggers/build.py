"""The loggers that a configuration asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from simpro_fast.config import Config
from simpro_fast.distributed.stop_requests import Preempted
from simpro_fast.run.loggers.base import Loggers, RunLogger, lacks, warn
from simpro_fast.run.loggers.mlflow import MlflowLog
from simpro_fast.run.loggers.tensorboard import TensorBoardLog
from simpro_fast.run.loggers.wandb import WandbLog
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import FileSchema, read_as

IDS = "loggers.json"
"""In the run directory: what W&B and MLflow call this run, so that it goes on as the same one."""
_DEFAULT_NAME = "simpro_fast"


class _Ids(FileSchema):
    """The content of `loggers.json`."""

    wandb: str | None = None
    mlflow: str | None = None


def check_packages(config: Config) -> None:
    """Find out before training, not after it, that something asked for cannot be made.

    Raises:
        UserError: naming the key, the package and the pip line.
    """
    log = config.log
    for key, wanted, module, package, extra in (
        ("log.figures", log.figures, "matplotlib", "matplotlib", "report"),
        ("log.figures", log.figures, "jinja2", "jinja2", "report"),
        ("log.tensorboard", log.tensorboard, "tensorboard", "tensorboard", "report"),
        ("log.wandb", log.wandb, "wandb", "wandb", "wandb"),
        ("log.mlflow", log.mlflow, "mlflow", "mlflow-skinny", "mlflow"),
    ):
        if wanted and importlib.util.find_spec(module) is None:
            raise lacks(key, package, extra)


def start_loggers(
    config: Config, run_dir: Path, class_names: Sequence[str], step: int, *, fresh: bool
) -> Loggers:
    """All loggers of a run that stands at `step`; one that cannot start is a warning.

    Args:
        fresh: the run does not go on from a checkpoint, so it is a new one for W&B and MLflow.

    Raises:
        UserError: a package cannot be used.
    """
    log, path = config.log, run_dir / IDS
    before = _Ids()
    if not fresh and path.is_file():
        with suppress(UserError):  # damaged: new runs then
            before = read_as(path, _Ids)
    project, experiment = _name(log.wandb), _name(log.mlflow)
    make: dict[str, Callable[[], RunLogger]] = {}
    if log.tensorboard:
        make["log.tensorboard"] = lambda: TensorBoardLog(run_dir, step)
    if project:
        make["log.wandb"] = lambda: WandbLog(config, run_dir, project, before.wandb)
    if experiment:
        make["log.mlflow"] = lambda: MlflowLog(config, experiment, before.mlflow)
    started: dict[str, RunLogger] = {}
    ids = before.model_dump(exclude_none=True)
    for key, one in make.items():
        try:
            started[key] = made = one()
        except (UserError, Preempted):
            raise
        except Exception as error:
            warn(key, "cannot start", error)
        else:
            if isinstance(made, WandbLog | MlflowLog):
                ids[key.removeprefix("log.")] = made.run_id
    if ids:
        write_json(path, ids)
    else:
        path.unlink(missing_ok=True)  # of an earlier start
    return Loggers(started, class_names)


def _name(value: bool | str) -> str | None:
    """Project or experiment; None where it is off."""
    return (_DEFAULT_NAME if value is True else value) or None
