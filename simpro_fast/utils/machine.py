"""This machine: its name, processor and cores."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import torch


def host_name() -> str:
    return socket.gethostname()


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


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
