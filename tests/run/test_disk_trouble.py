"""A disk that is full or read-only while a run trains on it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.run.checkpoint import list_checkpoints, save_checkpoint
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.errors import UserError

MakeConfig = Callable[..., Config]


def mount(*words: object) -> bool:
    return subprocess.run(["mount", *map(str, words)], capture_output=True).returncode == 0


class Disk:
    """A file system of a few megabytes that can be filled and made read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with (self.path / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def protect(self) -> None:
        assert mount("-o", "remount,ro", self.path)

    def restore(self) -> None:
        assert mount("-o", "remount,rw", self.path)
        (self.path / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=16m", "none", path):
        pytest.skip("mounting a tmpfs needs root")
    yield Disk(path)
    subprocess.run(["umount", str(path)], check=True)


def train(config: Config, at: dict[int, Callable[[], None]]) -> None:
    """Train; before the step that a number stands for, its action."""
    trainer = Trainer(config, start_ranks(config))
    original = trainer.train_step

    def train_step() -> None:
        at.get(trainer.step, lambda: None)()
        original()

    trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        trainer.close()


TROUBLE = pytest.mark.parametrize(
    ("trouble", "words"),
    [
        pytest.param(Disk.fill, "disk full: No space left", id="full"),
        pytest.param(Disk.protect, "Read-only file system", id="read-only", marks=pytest.mark.slow),
    ],
)


@TROUBLE
def test_continue_survives_trouble_that_passes(
    tiny: MakeConfig,
    disk: Disk,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Disk], None],
    words: str,
) -> None:
    config = tiny({"output_dir": str(disk.path), "checkpoint.on_error": "continue"})
    train(config, {5: lambda: trouble(disk), 11: disk.restore})
    warned = [r.getMessage() for r in caplog.records if "step_000000008.pt" in r.getMessage()]
    assert len(warned) == 1 and words in warned[0] and "training goes on" in warned[0]
    assert (config.run_dir / "summary.json").exists()
    assert len((config.run_dir / "metrics.jsonl").read_text().splitlines()) == 3


@TROUBLE
def test_without_its_last_checkpoint_a_run_has_failed(
    tiny: MakeConfig, disk: Disk, trouble: Callable[[Disk], None], words: str
) -> None:
    """And is not called finished, so that the next start goes on."""
    config = tiny({"output_dir": str(disk.path), "checkpoint.on_error": "continue"})
    with pytest.raises(UserError, match=rf"{words}|step 12, but its checkpoint could not be saved"):
        train(config, {9: lambda: trouble(disk)})
    disk.restore()
    assert not (config.run_dir / "summary.json").exists()
    train(config, {})
    assert (config.run_dir / "summary.json").exists()


def test_only_the_checkpoint_is_refused(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The results are written all the same, and the failure is said in words."""

    def refuse(*_: object) -> None:
        raise UserError("disk full")

    monkeypatch.setattr("simpro_fast.run.checkpoint.save_checkpoint", refuse)
    config = tiny({"checkpoint.on_error": "continue"})
    with pytest.raises(UserError, match="trained to step 12, but its checkpoint could not be"):
        train(config, {})
    assert (config.run_dir / "model.safetensors").exists()
    assert not (config.run_dir / "summary.json").exists()


def test_stop_says_what_the_disk_said(tiny: MakeConfig, disk: Disk) -> None:
    """And not what torch makes of it."""
    with pytest.raises(UserError, match=r"step_000000008\.pt: .*disk full: No space left") as error:
        train(tiny({"output_dir": str(disk.path), "train.period": 12}), {5: disk.fill})
    assert "inline_container" not in str(error.value)


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new/text", "x")
        save_checkpoint(tmp_path / "checkpoints", {"step": 1}, keep=2)
    finally:
        os.umask(before)
    for path in (tmp_path / "new/text", *list_checkpoints(tmp_path / "checkpoints")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o777 & ~umask
