"""Processes for tests that begin with everything imported.

They are forked from a server that has imported what a training process imports, which takes five
seconds of a core; a start takes a fraction of one. Each has a session, a folder, an environment
and output of its own, and ends as a process does: exit functions, exit code, signals. What is
about the imports themselves needs a process that does them: `subprocess`.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])

PATIENCE = 600.0
"""Seconds that a test waits for what a loaded machine does; no test has another limit for that."""


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher or another test may have left."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRITON_INTERPRET")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {
        **kept,
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
    }


# Below the ports that the kernel gives to sockets that ask for none, and 64 for each process of
# pytest, so that tests which run at once do not share one.
_ports = itertools.count(64 * os.getpid())


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, and that no other call has given."""
    for number in _ports:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", 20_000 + number % 12_000))
            return int(free.getsockname()[1])
    raise AssertionError("unreachable: the numbers do not end")


def start(
    function: Callable[..., object],
    *arguments: Any,
    output: Path | None = None,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    daemon: bool = False,
) -> multiprocessing.process.BaseProcess:
    """Start a process that calls a module-level function.

    Args:
        arguments: what pickle can carry, and ends of pipes.
        output: stdout goes to `<output>.out`, stderr to `<output>.err`; None: to those of pytest.
        folder: current folder; None: that of the server, which is that of pytest.
        environment: all of it; `clean_environment()` by default.
    """
    _start_server()
    environment = clean_environment() if environment is None else environment
    target = (function, arguments, output, folder, environment)
    process = _context.Process(target=_main, args=target, daemon=daemon)
    process.start()
    return process


@cache
def _start_server() -> None:
    """It must not have what a test may have set, such as Triton's interpreter."""
    before = dict(os.environ)
    after = clean_environment()
    for name in before.keys() - after.keys():
        del os.environ[name]
    os.environ.update(after)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def finish(
    process: multiprocessing.process.BaseProcess, output: Path, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives, of a process that writes to `output`."""
    process.join(timeout)
    late = process.exitcode is None
    if late:
        process.kill()
        process.join()
    said = [Path(f"{output}.{stream}").read_text() for stream in ("out", "err")]
    assert not late, f"still running after {timeout} s:\n{''.join(said)}"
    return subprocess.CompletedProcess([], int(process.exitcode or 0), *said)


def run(
    function: Callable[..., object],
    *arguments: Any,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Call a module-level function in a process, and wait for it."""
    with TemporaryDirectory() as place:
        output = Path(place) / "said"
        more = {"folder": folder, "environment": environment}
        return finish(start(function, *arguments, output=output, **more), output, timeout)


def as_nobody(function: Callable[..., object], *arguments: Any) -> None:
    """For `run`, where pytest has root's rights: call a function with those of another user."""
    os.setgid(65534)
    os.setuid(65534)
    function(*arguments)


def with_small_files(limit: int, function: Callable[..., object], *arguments: Any) -> None:
    """For `run`: call a function that can write no file of more than `limit` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    function(*arguments)


def printing_to(output: str | None, function: Callable[..., object], *arguments: Any) -> None:
    """For `run`: end with what a function returns, whose stdout is a file; None: a broken pipe."""
    if output is None:
        reader, target = os.pipe()
        os.close(reader)
    else:
        target = os.open(output, os.O_WRONLY)
    os.dup2(target, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.exit(function(*arguments))  # type: ignore[arg-type]


def script(path: str, arguments: Iterable[str]) -> None:
    """For `start` and `run`: what `python path arguments...` does."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _main(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    output: Path | None,
    folder: Path | None,
    environment: dict[str, str],
) -> None:
    os.setsid()
    if output is not None:
        for number, stream in ((1, "out"), (2, "err")):
            target = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, number)
            os.close(target)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # multiprocessing leaves them out
