"""Training from Python, in a notebook or a script: `train`."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from simpro_fast.answers.model import TrainedModel, load_model
from simpro_fast.answers.report.runs import Run, load_run
from simpro_fast.config import Config, load_config, parse_config
from simpro_fast.config.load import apply_overrides
from simpro_fast.distributed.environment import world_size_from_environment
from simpro_fast.training.launch import run_training
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.logs import LOGGERS


@dataclass(frozen=True, repr=False)
class FinishedRun(Run):
    """What `train` returns.

    Attributes:
        path: the run directory.
        summary: content of `summary.json`; accuracies in percent.
        metrics: one dictionary per period, as in `metrics.jsonl`.
    """

    @cached_property
    def model(self) -> TrainedModel:
        """The averaged network, see `load_model`."""
        return load_model(self.path, trust_code=True)  # it has just been trained here

    def __repr__(self) -> str:
        summary, top1 = self.summary, self.summary["top1"]
        measured = "nothing measured" if top1 is None else f"top-1 {top1:.2f} %"
        return f"<{summary['name']} seed {summary['seed']}: {measured}, in {self.path}>"


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config, *overrides: str
) -> FinishedRun:
    """Train in this process, on one device, as `simpro-fast train` does.

    Goes on from the newest checkpoint of the run; a finished run is returned as it is. Ctrl-C (the
    stop button of a notebook) raises `KeyboardInterrupt`, and the same call goes on from the last
    checkpoint. Nothing is left behind: no process group, threads, signal handlers or settings of
    torch. The engine is the plain one, which trains the same network, unless
    `distributed.zero_stage` asks for DeepSpeed.

    Args:
        config: a YAML file, the name of a shipped configuration (`digits_lt/reversed`), a nested
            dictionary of the same keys, or a `Config`.
        overrides: as on the command line: `"train.steps=100"`, `"seed=2"`.

    Raises:
        ConfigError: a key or a value is wrong, or a launcher started several processes.
        UserError: files, disk or data are in the way; says what and the cure.
    """
    chosen = _config(config, overrides)
    if world_size_from_environment() > 1:
        raise ConfigError(
            "train() works in one process, and a launcher has started several; "
            "start launch/train.py with it instead"
        )
    if not chosen.distributed.zero_stage:
        plain = chosen.distributed.model_copy(update={"engine": "plain"})
        chosen = chosen.model_copy(update={"distributed": plain})
    with _settings_put_back():
        run_training(chosen, guest=True)
    return FinishedRun(**vars(load_run(chosen.run_dir)))


def _config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: tuple[str, ...]
) -> Config:
    if isinstance(config, str | os.PathLike):
        return load_config(os.fspath(config), list(overrides))
    tree = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
    return parse_config(apply_overrides(copy.deepcopy(tree), list(overrides)))


@contextmanager
def _settings_put_back() -> Iterator[None]:
    """What a training sets for the whole process is as before: torch's settings, our loggers."""
    threads = torch.get_num_threads()
    backends = torch.backends
    flags = (
        (backends.cudnn, "benchmark"),
        (backends.cudnn, "allow_tf32"),
        (backends.cuda.matmul, "allow_tf32"),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name in flags]
    loggers = [logging.getLogger(name) for name in LOGGERS]
    logs = [(ours, ours.level, ours.handlers) for ours in loggers]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for owner, name, value in before:
            setattr(owner, name, value)
        for ours, level, handlers in logs:
            ours.setLevel(level)
            ours.handlers = handlers
