"""This machine: its name, processor and cores."""

from __future__ import annotations

import os
import platform
import socket
import stat
import tempfile
from pathlib import Path

import torch


def host_name() -> str:
    return socket.gethostname()


def cpu_cores() -> int:
    """Cores that this process may use, by its affinity and the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Seconds of CPU per second that the control groups of this process allow (v1 and v2).

    Args:
        root: what /proc and /sys lie in.

    Returns:
        the least over the group and those above it; None without a limit.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounts = ("", "unified") if not controllers else (controllers, "cpu")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be the host's: then only its upper end exists.
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            found += [_quota(root / "sys/fs/cgroup" / mount / group) for mount in mounts]
    return min((quota for quota in found if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


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
