"""A rank that fails, dies or hangs: all ranks end soon, and the last line says who and why."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.run.checkpoint import newest_whole
from simpro_fast.training import trainer as trainer_module
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError
from tests.distributed.command_ranks import CommandRanks, newest_step
from tests.processes import PATIENCE

MakeConfig = Callable[..., Config]
FAILED, INTERRUPTED = 1, 130


def _at_step(step: int, action: Callable[[], object]) -> None:
    """Let this process do something instead of starting `step`."""
    original = Trainer.train_step

    def train_step(self: Trainer) -> None:
        if self.step == step:
            action()
        original(self)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def _raise(error: Exception) -> None:
    raise error


def _bad_image(rank: int) -> None:
    if rank == 1:
        _at_step(7, lambda: _raise(UserError("cat.jpg is damaged; remove it")))


def _rank_0_fails(rank: int) -> None:
    _bad_image(1 - rank)


def _defect(rank: int) -> None:
    if rank == 1:
        _at_step(7, lambda: _raise(IndexError("list index out of range")))


def _killed(rank: int) -> None:
    if rank == 1:
        _at_step(7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _no_data(rank: int) -> None:
    if rank == 1:
        error = UserError("/data is not there; mount it")
        trainer_module.load_dataset = lambda config: _raise(error)  # type: ignore[assignment]


def _sleeps(rank: int) -> None:
    if rank == 1:
        _at_step(7, lambda: time.sleep(600))


def _assert_saved(config: Config, step: int) -> None:
    found = newest_whole(config.run_dir / "checkpoints")
    assert found is not None
    assert found[1]["step"] == step


@pytest.mark.parametrize(
    ("change", "codes", "last", "saved"),
    [
        (_bad_image, [1, 1], "failed first: cat.jpg is damaged; remove it", 4),
        (_defect, [1, 1], "failed first: IndexError: list index out of range", 4),
        (_killed, [1, -9], "another rank is gone or hangs; look at its output", 4),
        (_no_data, [1, 1], "failed first: /data is not there; mount it", 0),
    ],
    ids=["image", "defect", "killed", "set_up"],
)
def test_a_failing_rank_ends_all_and_is_named(
    tiny: MakeConfig,
    tmp_path: Path,
    change: Callable[[int], None],
    codes: list[int],
    last: str,
    saved: int,
) -> None:
    """`_killed` is what the kernel does to a process that takes too much memory."""
    config = tiny()
    ranks = CommandRanks(config, tmp_path, change=change)
    assert ranks.wait() == codes, ranks.output()
    peer = ranks.output(0, "err").splitlines()
    assert len(peer) == 1, peer
    named = "another rank" if change is _killed else "rank 1 on "
    assert peer[0].startswith(f"error [rank 0]: {named}")
    assert last in peer[0]
    if change is not _killed:
        own = "error [rank 1]: " + last.split(": ", 1)[1]
        assert ranks.output(1, "err").splitlines()[-1] == own
    assert ("Traceback" in ranks.output()) is (change is _defect)
    assert not ranks.left_behind()
    if saved:
        _assert_saved(config, saved)


def test_rank_0_waits_until_its_note_is_read(tiny: MakeConfig, tmp_path: Path) -> None:
    """It holds the store that the note is in."""
    ranks = CommandRanks(tiny({"distributed.engine": "plain"}), tmp_path, change=_rank_0_fails)
    assert ranks.wait() == [FAILED, FAILED], ranks.output()
    assert ranks.output(0, "err") == "error [rank 0]: cat.jpg is damaged; remove it\n"
    assert ranks.output(1, "err") == ""  # one line per machine


def test_a_rank_that_hangs_ends_the_others_after_the_timeout(
    tiny: MakeConfig, tmp_path: Path
) -> None:
    config = tiny({"distributed.collective_timeout": 20})
    ranks = CommandRanks(config, tmp_path, change=_sleeps)
    ranks.processes[0].join(PATIENCE)
    ranks.send(signal.SIGKILL, 1)  # what a launcher does then
    assert ranks.wait() == [FAILED, -signal.SIGKILL], ranks.output()
    (line,) = ranks.output(0, "err").splitlines()
    assert line.startswith("error [rank 0]: another rank is gone or hangs; look at its output")
    _assert_saved(config, 4)


@pytest.mark.parametrize("to", [pytest.param((), marks=pytest.mark.slow), (1,)], ids=["all", "one"])
def test_ctrl_c_ends_all_ranks_with_one_line(
    tiny: MakeConfig, tmp_path: Path, to: tuple[int, ...]
) -> None:
    """What was saved last still loads."""
    config = tiny({"train.steps": 5000, "checkpoint.every": 4})
    ranks = CommandRanks(config, tmp_path)
    ranks.wait_for_checkpoint(4)
    ranks.send(signal.SIGINT, *to)
    assert ranks.wait() == [INTERRUPTED, INTERRUPTED], ranks.output()
    assert len(ranks.errors()) == 1, ranks.errors()
    assert "interrupted; start again to resume from the last checkpoint" in ranks.errors()[0]
    assert not ranks.left_behind()
    _assert_saved(config, newest_step(config))


def _no_large_files(rank: int) -> None:
    """From step 8 on, rank 0 can write no file of the size of a checkpoint."""
    original = Trainer.save

    def save(self: Trainer) -> int | None:
        if rank == 0 and self.step >= 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return original(self)

    Trainer.save = save  # type: ignore[method-assign]


def _no_such_interface(rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"


def test_a_wrong_network_interface_is_one_line(tiny: MakeConfig, tmp_path: Path) -> None:
    ranks = CommandRanks(tiny(), tmp_path, change=_no_such_interface)
    assert ranks.wait() == [2, 2], ranks.output()
    assert len(ranks.errors()) == 1, ranks.output()
    assert "GLOO_SOCKET_IFNAME=nosuch0: " in ranks.errors()[0] and "but lo" in ranks.errors()[0]


def test_a_full_disk_stops_both_ranks(tiny: MakeConfig, tmp_path: Path) -> None:
    """The checkpoint before stays, nothing half-written is left, nobody hangs."""
    config = tiny()
    ranks = CommandRanks(config, tmp_path, change=_no_large_files)
    assert ranks.wait() == [2, 2], ranks.output()
    assert "step_000000008.pt" in ranks.output(0, "err")
    assert "earlier checkpoints are kept" in ranks.output(0, "err")
    assert len(ranks.errors()) == 1, ranks.errors()
    assert [p.name for p in (config.run_dir / "checkpoints").iterdir()] == ["step_000000004.pt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _fill_disk_for_a_while(rank: int) -> None:
    """After step 7 somebody else fills the disk, after step 13 they clear it again."""
    original = Trainer.train_step

    def train_step(self: Trainer) -> None:
        filler = self.setup.config.output_dir / "filler"
        if rank == 0 and self.step == 7:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if rank == 0 and self.step == 13:
            filler.unlink()
        original(self)

    Trainer.train_step = train_step  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_full_disk_is_survived_if_so_configured(
    tiny: MakeConfig, tmp_path: Path, small_disk: Path
) -> None:
    """Neither a checkpoint nor a row of metrics is left cut short, and no row is lost."""
    changes = {"checkpoint.on_error": "continue", "train.steps": 16, "train.period": 10}
    config = tiny({**changes, "output_dir": str(small_disk)})
    ranks = CommandRanks(config, tmp_path, change=_fill_disk_for_a_while)
    assert ranks.wait() == [0, 0], ranks.output()
    for what in ("step_000000008.pt", "metrics.jsonl", "step_000000012.pt"):
        assert what in ranks.output(0, "out")
    kept = sorted(p.name for p in (config.run_dir / "checkpoints").iterdir())
    assert kept == ["step_000000004.pt", "step_000000016.pt"]
    rows = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [10, 16]


def test_no_thread_outlives_a_failed_run(tiny: MakeConfig) -> None:
    """The data pipeline's native threads are counted too; the first run starts those that stay."""

    def fail(self: Any) -> None:
        if self.step == 3:
            raise UserError("enough")
        original(self)

    original = Trainer.train_step
    counts = []
    for attempt in range(3):
        config = tiny({"name": f"attempt{attempt}"})
        trainer = Trainer(config, start_ranks(config))
        trainer.train_step = fail.__get__(trainer)  # type: ignore[method-assign]
        with pytest.raises(UserError, match="enough"):
            trainer.fit()
        trainer.close()
        counts.append((threading.active_count(), len(os.listdir("/proc/self/task"))))
    assert counts[1] == counts[2]
