"""Folders on a machine for what is compiled there."""

from __future__ import annotations

import os
import stat
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
