"""How verbs end: Ctrl-C wherever it arrives, packages that are broken, errors of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from simpro_fast.cli.ending import verb
from simpro_fast.config import Config
from simpro_fast.distributed.failures import conclude
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.distributed.stop_requests import StopRequests
from simpro_fast.training.engine.deepspeed import import_deepspeed
from simpro_fast.utils.errors import UserError
from tests import processes
from tests.processes import PATIENCE


def swallowed(_: Sequence[str] | None) -> int:
    """As a callback in C does."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        return 0
    return 0


def wrapped(_: Sequence[str] | None) -> int:
    """As torch's ONNX exporter does."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:
        raise UserError("cannot be exported") from error
    return 0


@pytest.mark.parametrize("body", [swallowed, wrapped])
def test_no_library_swallows_an_interrupt(
    body: Callable[[Sequence[str] | None], int], capsys: pytest.CaptureFixture[str]
) -> None:
    # A job in the background starts with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert verb(body)([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted; files are whole\n"


def broken(folder: Path, *names: str) -> Path:
    """Packages that are installed and fail on import."""
    for name in names:
        package = folder / name
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('no driver for this build')\n")
    return folder


def test_broken_packages_do_not_end_verbs_that_need_none(tmp_path: Path) -> None:
    environment = processes.clean_environment()
    environment["PYTHONPATH"] = str(broken(tmp_path, "triton", "deepspeed"))
    done = subprocess.run(
        [sys.executable, "-m", "simpro_fast", "predict", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: simpro-fast predict" in done.stdout


def test_a_broken_engine_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(broken(tmp_path, "deepspeed")))
    with pytest.raises(UserError, match=r"no driver for this build.*distributed\.engine=plain"):
        import_deepspeed(torch.device("cpu"))


def test_tracebacks_keep_their_lines(
    tiny: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny()
    ranks = start_ranks(config)
    try:
        raise KeyError("a\x1b[31m name")
    except KeyError as error:
        assert conclude(error, ranks, StopRequests()) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and len(lines) >= 5
    assert lines[-1].startswith("error: KeyError") and "\x1b" not in "".join(lines)
