"""Files that replace others: what a kill leaves is removed, what is being written is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simpro_fast.utils.atomic_write import replacing, write_atomically

KILLED = """
import os, signal, sys
from pathlib import Path
from simpro_fast.utils.atomic_write import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "report[1].html"
    write_atomically(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert done.returncode == -signal.SIGKILL and len(names(tmp_path)) == 2
    (tmp_path / ".report1.html.01234567.tmp").write_text("of another file")
    with replacing(path) as file:
        file.write(b"a slow writer's")
        write_atomically(path, "new")
        assert path.read_text() == "new" and len(names(tmp_path)) == 3
    assert path.read_text() == "a slow writer's"
    assert names(tmp_path) == [".report1.html.01234567.tmp", "report[1].html"]


def test_writers_at_once_all_succeed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            list(threads.map(lambda _: write_atomically(path, "whole", durable=False), range(50)))
    assert path.read_text() == "whole" and names(tmp_path) == ["a"]
