"""Folders on a machine for what is compiled there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from simpro_fast.distributed.process_group import _keep_kernels_here
from simpro_fast.utils.machine import private_folder


def test_kernels_are_kept_on_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    _keep_kernels_here()
    assert os.environ["TRITON_CACHE_DIR"] == "/chosen"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    _keep_kernels_here()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == tmp_path


def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is loaded from it, and anybody may make folders in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder("x")
    assert folder is not None and folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder("x") == folder
    folder.chmod(0o777)
    assert private_folder("x") is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert private_folder("x") is None
    folder.unlink()
    folder.mkdir(0o700)
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
        assert private_folder("x") is None


# A process of its own, since malloc cannot be told to forget. 30 arrays of 8 MiB, one at a time.
TOUCH = """
import resource
import numpy
from simpro_fast.utils.machine import reuse_freed_memory
told = reuse_freed_memory()
def touch():
    array = numpy.empty(2**20)
    array.fill(1.0)
for _ in range(3):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    touch()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_used_again_without_page_faults() -> None:
    pages = 30 * 2**23 // os.sysconf("SC_PAGE_SIZE")
    # numpy asks for huge pages, which would hide most of the faults.
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TOUCH], env=environment, capture_output=True, text=True, check=True
    )
    told, faults = done.stdout.split()
    assert told == "True" and int(faults) < pages / 100
