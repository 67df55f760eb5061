"""Weights & Biases, online or (`WANDB_MODE=offline`) in files of the run directory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from simpro_fast.config import Config, flatten
from simpro_fast.run.loggers.base import lacks

START_SECONDS = 60


class WandbLog:
    """A W&B run, files of which lie in `<run>/wandb`.

    Numbers, figures and the configuration are sent; neither the command line nor code, commits or
    the machine's state. Login, entity and mode come from the environment (`WANDB_API_KEY`, ...).

    Args:
        run_dir: exists.
        project: name of the W&B project.
        run_id: of the run that goes on; None: a new one.

    Raises:
        UserError: the package cannot be used.
        Exception: whatever W&B raises, such as for a missing login.
    """

    def __init__(self, config: Config, run_dir: Path, project: str, run_id: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError:
            raise lacks("log.wandb", "wandb", "wandb") from None
        self._wandb: Any = wandb
        self.run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=project,
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

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
