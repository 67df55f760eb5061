"""This machine: its name, processor, cores and memory."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import stat
import tempfile
from pathlib import Path

import joblib
import torch


def host_name() -> str:
    return socket.gethostname()


def cpu_cores() -> int:
    """Cores that this process may use, by its affinity and the CPU quota of its container."""
    return int(joblib.cpu_count())


def private_folder(name: str) -> Path | None:
    """`<name>-<user>` on a disk of this machine; None where it is not this user's alone.

    What is loaded from it as code must not be somebody else's.
    """
    path = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return None
    alone = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if stat.S_ISDIR(found.st_mode) and alone else None


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_name() -> str:
    """One line: processor, cores, GPU."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{processor_name()}, {cpu_cores()} cores{gpu}"


# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def reuse_freed_memory() -> bool:
    """Let malloc keep what a CPU step frees for the next one; returns whether it was told.

    Otherwise glibc maps every large activation anew and unmaps it when it is freed, so that each
    step pays for the page faults of its whole working set (docs/performance.md). Does nothing where
    the environment already tunes malloc, or where the C library is another one.
    """
    if "GLIBC_TUNABLES" in os.environ or any(k.startswith("MALLOC_") for k in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
