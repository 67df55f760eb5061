"""Files that replace others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simpro_fast.utils.atomic_write import write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writers_at_once_all_succeed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            list(threads.map(lambda _: write_atomically(path, "whole", durable=False), range(50)))
    assert path.read_text() == "whole" and names(tmp_path) == ["a"]
