"""The run directory: what a run leaves behind, every file written whole."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from simpro_fast.config import Config, dump_config
from simpro_fast.training.ranks import Ranks, cpu_cores

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


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, or leave it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: a number that is not finite becomes null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The same structure with null for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class RunDirectory:
    """Paths of one run and the append-only metrics file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"

    def is_empty(self) -> bool:
        return not self.path.exists() or not any(self.path.iterdir())

    def read_summary(self) -> dict[str, Any] | None:
        if not self.summary.is_file():
            return None
        loaded: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        return loaded

    def start(self, config: Config, ranks: Ranks, facts: dict[str, Any]) -> None:
        """Write the configuration and the environment."""
        write_atomically(self.path / "config.yaml", dump_config(config))
        write_json(self.path / "environment.json", {**environment(ranks), **facts})

    def append_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")

    def cut_metrics(self, step: int) -> None:
        """Drop rows later than `step` and a line that was cut short: they are made again."""
        if not self.metrics.is_file():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] > step:
                break
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
        "machine": machine(),
        "command": sys.argv,
        "world_size": ranks.world_size,
        "device": str(ranks.device),
        "torch_threads": torch.get_num_threads(),
    }


def machine() -> str:
    """One line: processor, cores, GPU."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {cpu_cores()} cores{gpu}"


def git_commit() -> str | None:
    """Commit of the source tree, with `+` when it has uncommitted changes; None outside a clone."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A wheel inside somebody else's repository must not claim their commit.
    if git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else None
