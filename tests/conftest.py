"""Shared fixtures: a tiny configuration, and the training command as a subprocess."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Triton decides at its first import whether it interprets kernels; some tests import it early.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The key of inductor's cache leaves out ATEN_CPU_CAPABILITY, so code for one set of instructions
# would be taken for another.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{gettempdir()}/simpro-inductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}",
)

from simpro_fast.config import Config, parse_config
from tests import processes
from tests.processes import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "launch" / "train.py")
COMMAND = str(Path(sys.executable).parent / "simpro-fast")

# 16 px digits, 2 strong views: every part of the system, a few hundred milliseconds.
TINY: dict[str, Any] = {
    "name": "tiny",
    "method": {"threshold": 0.5, "alpha_max": 1.0},
    "methods": {"simpro": {"tau": 1.0}},
    "data": {
        "name": "digits",
        "labeled_max": 20,
        "unlabeled_max": 40,
        "gamma_labeled": 4.0,
        "unlabeled_distribution": "reversed",
        "test_per_class": 10,
        "batch_size": 8,
        "mu": 2,
        "cutout": 6,
    },
    "model": {"name": "small_cnn", "bn_momentum": 0.1},
    "optim": {"lr": 0.05, "schedule": "cosine"},
    "train": {"steps": 12, "period": 5, "ema_decay": 0.9, "threads": 1},
    "evaluate": {"shares_images": 0},  # sampling takes longer than the training
    "checkpoint": {"every": 4},
    "distributed": {"engine": "plain"},
    "log": {"figures": False, "tensorboard": False, "progress": "off"},
}


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is visible"))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Trainers that run inside a test leave their process group open; the next test has its own.

    And its one thread: a process that is forked from one with several may hang in the first loop.
    """
    yield
    torch.set_num_threads(1)
    if dist.is_initialized():
        from simpro_fast.distributed.process_group import stop_ranks

        stop_ranks()


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """A factory of tiny configurations under `tmp_path`; arguments are `{"section.key": value}`."""

    def make(changes: dict[str, Any] | None = None) -> Config:
        tree = copy.deepcopy(TINY)
        tree["output_dir"] = str(tmp_path / "runs")
        for dotted, value in (changes or {}).items():
            *sections, key = dotted.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
        return parse_config(tree)

    return make


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that another user may enter; pytest closes its own, also those of other runs."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def train_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `launch/train.py` in `tmp_path`: arguments, then `env=` and `launcher=` (a list).

    Without a launcher its process has imported everything before; `[sys.executable]` imports.
    """

    def run(
        *arguments: str,
        env: dict[str, str] | None = None,
        launcher: list[str] | None = None,
        timeout: float = PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        environment = {**processes.clean_environment(), **(env or {})}
        if launcher is None:
            return processes.run(
                processes.script,
                TRAIN,
                arguments,
                folder=tmp_path,
                environment=environment,
                timeout=timeout,
            )
        return subprocess.run(
            [*launcher, TRAIN, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
