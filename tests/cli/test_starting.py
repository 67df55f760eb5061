"""The first seconds of a start: signals while Python imports, and a run that is taken."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from simpro_fast.cli.train import main
from simpro_fast.config import Config, dump_config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.distributed.signals import end_on_signals
from simpro_fast.distributed.stop_requests import StopRequests
from simpro_fast.run.lock import RunLock, lock_path
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.logs import FOUND_BY_ALL, log_to_terminal
from tests.conftest import TRAIN
from tests.distributed.command_ranks import CommandRanks
from tests.processes import clean_environment

MakeConfig = Callable[..., Config]

# Stands in for the first heavy import, and swallows what a signal raises in it, as many do.
_INTERRUPTED_IMPORT = """
import os
try:
    os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))
except BaseException:
    pass
os._exit(99)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command up to its first heavy import, which sends a signal to itself."""
    (tmp_path / "pydantic.py").write_text(_INTERRUPTED_IMPORT)

    def not_ignored() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests may run in the background

    def run(
        number: int,
        rank: int = 0,
        before: Callable[[], object] = not_ignored,
        words: tuple[str, ...] = (TRAIN, "--config", "digits_lt/reversed"),
    ) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}:{Path(TRAIN).parents[1]}"
        extra = {"PYTHONPATH": path, "TEST_SIGNAL": str(number), "RANK": str(rank)}
        return subprocess.run(
            [sys.executable, *words],
            env={**clean_environment(), **extra},
            capture_output=True,
            text=True,
            preexec_fn=before,
        )

    return run


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted before anything was done"),
        (signal.SIGTERM, 75, "preempted (SIGTERM) before training began"),
        (signal.SIGUSR1, 75, "preempted (SIGUSR1) before training began"),
    ],
)
def test_a_signal_during_imports_is_one_line(
    start: Callable[..., subprocess.CompletedProcess[str]], number: int, code: int, said: str
) -> None:
    for rank in (0, 1):
        done = start(number, rank)
        assert (done.returncode, done.stdout) == (code, "")
        assert len(done.stderr.splitlines()) == 1 - rank, done.stderr  # rank 0 speaks for all
        assert said in done.stderr or rank == 1


@pytest.mark.parametrize("verb", ["prepare", "predict", "report"])
def test_an_interrupt_of_any_verb_during_imports_is_one_line(
    start: Callable[..., subprocess.CompletedProcess[str]], verb: str
) -> None:
    done = start(signal.SIGINT, words=("-m", "simpro_fast", verb))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted before anything was done; start again\n"


def test_ignored_interrupts_stay_ignored(
    start: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """As under nohup: the import goes on."""
    done = start(signal.SIGINT, before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stderr) == (99, "")


def test_training_in_a_worker_thread(tiny: MakeConfig, tmp_path: Path) -> None:
    """Signals then stay the affair of the program around it."""
    config = tiny({"train.steps": 2, "train.period": 1})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    codes: list[int] = []
    command = ["--config", str(tmp_path / "config.yaml")]
    thread = threading.Thread(target=lambda: codes.append(main(command)))
    thread.start()
    thread.join()
    assert codes == [0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_after_training_signals_do_what_they_usually_do() -> None:
    """And nothing says that training has not begun."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    end_on_signals()
    requests = StopRequests()
    requests.install()
    requests.remove()
    usual = [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]
    assert [signal.getsignal(number) for number in numbers] == usual


def test_ranks_say_only_what_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    ours, logger = logging.getLogger("simpro_fast"), logging.getLogger("simpro_fast.test")
    handlers, level = list(ours.handlers), ours.level
    try:
        for is_main, expected in ((True, "all\nmine\n"), (False, "mine\n")):
            ours.handlers = []
            log_to_terminal(is_main)
            logger.warning("all", extra=FOUND_BY_ALL)
            logger.warning("mine")
            assert capsys.readouterr().out == expected
    finally:
        ours.handlers = handlers
        ours.setLevel(level)


@contextmanager
def _taken(run_dir: Path) -> Iterator[None]:
    """As by a start on another machine."""
    path = lock_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 7 on elsewhere\n")
        lock.flush()
        yield


def test_a_run_is_not_started_twice_at_once(
    tiny: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny({"train.steps": 2, "train.period": 1})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    precious = config.run_dir / "metrics.jsonl"
    config.run_dir.mkdir(parents=True)
    precious.write_text("of the other start")
    command = ["--config", str(tmp_path / "config.yaml")]
    with _taken(config.run_dir):
        assert main(command) == 1
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "in use: process 7 on elsewhere" in lines[0] and "another name" in lines[0]
        ranks = CommandRanks(config, tmp_path / "ranks")
        assert main([*command, "--dry-run"]) == 0
        assert ranks.wait() == [1, 1], ranks.output()
        assert len(ranks.errors()) == 1 and "process 7 on elsewhere" in ranks.errors()[0]
    assert [p.name for p in config.run_dir.iterdir()] == ["metrics.jsonl"]
    assert precious.read_text() == "of the other start"


def test_a_run_is_free_again_after_its_end(tiny: MakeConfig, tmp_path: Path) -> None:
    """Also in the same process, and it has said who it was."""
    config = tiny({"train.steps": 1, "train.period": 1})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    for _ in range(2):
        assert main(["--config", str(tmp_path / "config.yaml")]) == 0
    assert f"process {os.getpid()} on " in lock_path(config.run_dir).read_text()
    with lock_path(config.run_dir).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_deleted_lock_file_frees_no_run(tiny: MakeConfig) -> None:
    """The folder is locked as well, until the holder ends; one that stayed empty goes then."""
    config = tiny()
    ranks = start_ranks(config)
    holder, other = RunLock(config.run_dir, ranks), RunLock(config.run_dir, ranks)
    holder.take()
    lock_path(config.run_dir).unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{config.run_dir} is in use: another process"):
            other.take()
    holder.release()
    assert not config.run_dir.exists()
    other.take()
    with pytest.raises(UserError, match=rf"in use: process {os.getpid()} on "):
        holder.take()
    other.release()
