"""The run directory: what a run leaves behind, every file written whole."""

from __future__ import annotations

import json
import logging
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from simpro_fast.config import Config, dump_config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.run.checkpoint import list_checkpoints, step_of
from simpro_fast.run.files import ENVIRONMENT, METRICS, SUMMARY, metrics_row, read_summary
from simpro_fast.utils.atomic_write import (
    finite,
    unwritable,
    write_atomically,
    write_json,
)
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.logs import FOUND_BY_ALL
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import git_commit

logger = logging.getLogger(__name__)

_PACKAGES = (
    "simpro_fast",
    "torch",
    "triton",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
    "deepspeed",
    "numpy",
    "pydantic",
)


class RunDirectory:
    """Paths of one run and the append-only metrics file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.checkpoints = path / "checkpoints"
        self.summary = path / SUMMARY
        self._unwritten: list[str] = []

    def is_empty(self) -> bool:
        """Whether nothing of a run is there."""
        return not self.path.exists() or not any(self.path.iterdir())

    def owns(self, checkpoint: Path) -> bool:
        """Whether it lies here; one of another run says nothing of this one's files."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None; a damaged one is named and counts as none."""
        if not self.summary.is_file():
            return None
        try:
            return read_summary(self.summary)
        except UserError as error:
            logger.warning("%s: the run counts as unfinished", error, extra=FOUND_BY_ALL)
            return None

    def start(
        self, config: Config, ranks: Ranks, facts: dict[str, Any], weights: dict[str, Any] | None
    ) -> None:
        """Write what a fresh run starts with. Everything that can be refused has been by now.

        Args:
            facts: for environment.json, besides versions and machine.
            weights: what `model.weights` filled.
        """
        logger.info("no checkpoint in %s: starting fresh", self.checkpoints)
        self._describe(config, ranks, facts)
        path = self.path / "weights.json"
        if weights is None:
            path.unlink(missing_ok=True)  # of an earlier start
        else:
            write_json(path, weights)
        self._cut(0, rows_to=0)

    def go_on(
        self,
        config: Config,
        ranks: Ranks,
        facts: dict[str, Any],
        checkpoint: Path,
        step: int,
        *,
        unfinished: bool,
    ) -> None:
        """Write the same for a run that goes on from `checkpoint`, and cut its metrics there.

        Args:
            unfinished: the row of this step is still to be written.
        """
        logger.info("resumed from %s at step %d", checkpoint, step)
        self._describe(config, ranks, facts)
        if self.owns(checkpoint) and step >= config.train.period and not self.metrics.is_file():
            logger.warning(
                "%s is missing: its rows up to step %d are lost, it begins anew after that",
                self.metrics,
                step - unfinished,
            )
        self._cut(step, rows_to=step - unfinished)

    def _describe(self, config: Config, ranks: Ranks, facts: dict[str, Any]) -> None:
        write_atomically(self.path / "config.yaml", dump_config(config))
        write_json(self.path / ENVIRONMENT, {**environment(ranks), **facts})

    def append_metrics(self, row: dict[str, Any], on_error: str) -> None:
        """Add a row and those that could not be written before it: all of them, or none.

        On disk when it returns, so that no later checkpoint lacks it.

        Args:
            on_error: `checkpoint.on_error`; with `continue` a refusal is a warning.

        Raises:
            UserError: the disk refuses them; they are kept for the next call.
        """
        self._unwritten.append(json.dumps(finite(row), allow_nan=False) + "\n")
        size = None
        try:
            size = self.metrics.stat().st_size if self.metrics.exists() else 0
            with self.metrics.open("a", encoding="utf-8") as file:
                file.writelines(self._unwritten)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.metrics, size)
            refusal = unwritable(self.metrics, error)
            if on_error == "stop":
                raise refusal from None
            logger.warning("%s; training goes on (checkpoint.on_error=continue)", refusal)
            return
        self._unwritten.clear()

    def row_of(self, step: int) -> dict[str, Any] | None:
        """The row of metrics of this step, if it has been written whole."""
        if self.metrics.is_file():
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(UserError):
                    row = metrics_row(line, self.metrics)
                    if row["step"] == step:
                        return row
        return None

    def _cut(self, step: int, rows_to: int) -> None:
        """Put aside whatever was made after `step`: it is made again, perhaps differently."""
        self.summary.unlink(missing_ok=True)
        for path in list_checkpoints(self.checkpoints):
            if step_of(path) > step:
                logger.info("%s is later than step %d: put aside", path, step)
                path.replace(path.with_suffix(".abandoned"))
        if not self.metrics.is_file():
            return
        kept = []
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                row = metrics_row(line, f"{self.metrics}: line {number}")
            except UserError as error:
                if number < len(lines):  # a killed run leaves at most its last line cut short
                    logger.warning("%s, and is left out", error)
                continue
            if row["step"] <= rows_to:
                kept.append(line + "\n")
        write_atomically(self.metrics, "".join(kept))


def environment(ranks: Ranks) -> dict[str, Any]:
    """Versions, commit and machine: what is needed to understand a number later."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with its build, which the package's metadata lacks
    return {
        "versions": versions,
        "commit": git_commit(),
        "machine": machine_name(),
        "world_size": ranks.world_size,
        "device": str(ranks.device),
        "torch_threads": torch.get_num_threads(),
    }
