"""MLflow, on the server of `MLFLOW_TRACKING_URI` or in a folder."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from simpro_fast.config import Config, flatten
from simpro_fast.run.loggers.base import lacks

FOLDER = "mlruns"
_BATCH = {"params": 100, "metrics": 1000}
"""Items that the server takes at once."""
_DEFAULTS = {
    # A server that is gone must not hold up training for the library's own ten minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_NOT_IN_NAMES = re.compile(r"[^\w\-. ]", re.ASCII)


class MlflowLog:
    """An MLflow run; without `MLFLOW_TRACKING_URI` in `<output_dir>/mlruns`.

    Args:
        experiment: name of the MLflow experiment, made where it is missing.
        run_id: of the run that goes on; None: a new one.

    Raises:
        UserError: the package cannot be used.
        Exception: whatever MLflow raises, such as for a server that does not answer.
    """

    def __init__(self, config: Config, experiment: str, run_id: str | None) -> None:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError:
            raise lacks("log.mlflow", "mlflow-skinny", "mlflow") from None
        self._metric: Any = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # a file store needs no database package, but a word since MLflow 3
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (config.output_dir / FOLDER).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is None:
            known = self._client.get_experiment_by_name(experiment)
            place = known.experiment_id if known else self._client.create_experiment(experiment)
            made = self._client.create_run(place, run_name=f"{config.name} seed {config.seed}")
            self.run_id = made.info.run_id
            params = [Param(key, str(value)) for key, value in flatten(config).items()]
            for first in range(0, len(params), _BATCH["params"]):
                part = params[first : first + _BATCH["params"]]
                self._client.log_batch(self.run_id, params=part)
        else:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")

    def scalars(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_metric_name(key), value, now, step) for key, value in values.items()
        ]
        for first in range(0, len(metrics), _BATCH["metrics"]):
            part = metrics[first : first + _BATCH["metrics"]]
            self._client.log_batch(self.run_id, metrics=part)

    def figure(self, path: Path, step: int) -> None:
        self._client.log_artifact(self.run_id, str(path), "report")

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")


def _metric_name(key: str) -> str:
    """MLflow takes ASCII, and slashes where a path may have them."""
    return "/".join(_NOT_IN_NAMES.sub("_", part) for part in key.split("/", 1))
