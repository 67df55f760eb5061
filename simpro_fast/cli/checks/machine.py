"""Checks of one machine that ask no other rank: hardware, driver, versions, free disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from simpro_fast.cli.checks.table import Line
from simpro_fast.config import Config
from simpro_fast.models import build_model
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import library_versions, version_of

# Oldest drivers that run CUDA wheels of these majors (NVIDIA, CUDA compatibility guide).
_OLDEST_DRIVER = {12: 525, 13: 580}
# Sizes are an upper bound for a data set that has not been looked at.
_MANY_CLASSES = 1000
_LARGEST_SIDE = 64


def check_machine() -> Line:
    """Processor, cores, memory, GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{machine_name()}, {memory:.0f} GiB memory"
    if torch.cuda.is_available():
        return Line("ok", f"{text}; {torch.cuda.device_count()} GPU(s) visible")
    driver = _driver()
    if driver is None:
        return Line("ok", f"{text}; no NVIDIA GPU, so everything runs on the processor")
    if torch.version.cuda is None:
        return Line(
            "problem",
            f"{text}; a GPU (driver {driver}), but this torch is built for processors only",
            "install torch with CUDA: pip install torch",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return Line(
            "problem",
            f"{text}; no GPU is usable with CUDA_VISIBLE_DEVICES={visible!r}",
            "unset it, and choose GPUs by deepspeed --include host:0,1",
        )
    return Line(
        "problem",
        f"{text}; a GPU (driver {driver}), but torch {torch.__version__} cannot use it",
        "update the driver, or install a torch built for an older CUDA",
    )


def _driver() -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def check_versions() -> Line:
    """Versions of everything that computes, too old ones and pairs that do not go together."""
    found = library_versions()
    driver = _driver()
    text = ", ".join(f"{name} {version}" for name, version in found.items() if name != "NCCL")
    if torch.version.cuda is not None and driver is not None:
        text += f"; driver {driver}"
    bad = [*_too_old(), *_bad_pairs(driver)]
    if bad:
        return Line("problem", f"{text}; {'; '.join(what for what, _ in bad)}", bad[0][1])
    return Line("ok", text)


def _too_old() -> list[tuple[str, str]]:
    """Installed packages below what simpro_fast asks for: (what is wrong, cure)."""
    try:
        wanted = metadata.requires("simpro_fast") or []
    except metadata.PackageNotFoundError:
        return []  # run from a tree that was never installed: nothing says what is needed
    bad = []
    for requirement in wanted:
        match = re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, least = match.groups()
        version = version_of(name, *(["nvidia-dali-cuda120"] if "dali" in name else []))
        if version is None:
            bad.append((f"{name} is not installed", f"pip install '{name}>={least}'"))
        elif _numbers(version) < _numbers(least):
            bad.append((f"{name} {version} is below {least}", f"pip install '{name}>={least}'"))
    return bad


def _bad_pairs(driver: str | None) -> list[tuple[str, str]]:
    bad = []
    if version_of("nvidia-dali-cuda120") and version_of("nvidia-dali-cuda130"):
        both = "nvidia-dali-cuda120 and -cuda130 overwrite each other's files"
        bad.append((both, "pip uninstall both, then install the one for your driver"))
    if driver and torch.version.cuda:
        least = _OLDEST_DRIVER.get(int(torch.version.cuda.partition(".")[0]))
        if least and _numbers(driver)[0] < least:
            bad.append(
                (f"CUDA {torch.version.cuda} needs driver {least} or newer", "update the driver")
            )
    return bad


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def check_disk(config: Config, folder: Path) -> Line:
    """Free space where the run goes, against the checkpoints that the configuration keeps."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    side = config.data.image_size or _LARGEST_SIDE
    model = build_model(config.model, _MANY_CLASSES, side)
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    # The weights, their average and the optimizer's slots; one file more while saving.
    slots = {"sgd": 1, "adamw": 2}[config.optim.name]
    need = weights * (2 + slots) * (config.checkpoint.keep + 1)
    text = f"{_size(free)} free in {existing}; checkpoints need at most {_size(need)}"
    cure = "free some space, or set output_dir or checkpoint.keep"
    if free < need:
        return Line("problem", text, cure)
    return Line("warning", text, cure) if free < 4 * need else Line("ok", text)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
