"""What a machine, or a container on it, gives to a process."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from simpro_fast.distributed.process_group import _keep_kernels_here
from simpro_fast.utils.machine import cpu_quota, private_folder

V1 = "4:memory:/job/a\n2:cpu,cpuacct:/job/a\n"
V2 = "0::/job/a\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (V2, {"job/a/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"job/a/cpu.max": "max 100000\n", "job/cpu.max": "400000 100000\n"}, 4.0),
        (V2, {"job/a/cpu.max": "max 100000\n"}, None),
        (V2, {"cpu.max": "200000 100000\n"}, 2.0),
        (V1, {"cpu,cpuacct/job/a/cpu.cfs_quota_us": "50000\n"}, 0.5),
        (V1, {"cpu/job/a/cpu.cfs_quota_us": "-1\n"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "300000\n"}, 3.0),
        (V1, {"memory/job/a/cpu.cfs_quota_us": "50000\n"}, None),
        (None, {}, None),
    ],
)
def test_quota_of_a_container(
    tmp_path: Path, groups: str | None, files: dict[str, str], quota: float | None
) -> None:
    """As Kubernetes and Docker set it; in a container the path may be the host's."""
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if "quota" in name:
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    assert cpu_quota(tmp_path) == quota


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
