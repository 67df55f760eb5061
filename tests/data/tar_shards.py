"""WebDataset tar shards for the tests, written by Python's tarfile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from simpro_fast.data.files.scan_shards import scan_shard
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.errors import UserError
from tests.data.image_folders import picture


def write_tar(
    path: Path, members: Iterable[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT
) -> Path:
    """An uncompressed tar of (name, content) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def as_shards(root: Path, target: Path, per_shard: int = 8) -> Path:
    """The images of a tidy folder as `target/{labeled,unlabeled,val}-NNN.tar`, in the same order.

    A sample's key is the file's path, so that it stands where the file stood; classes are names.
    """
    for part in ("labeled", "unlabeled", "val"):
        files = sorted(path for path in (root / part).rglob("*") if path.is_file())
        for number, start in enumerate(range(0, len(files), per_shard)):
            members = []
            for file in files[start : start + per_shard]:
                name = file.relative_to(root / part).as_posix()
                members.append((name, file.read_bytes()))
                if part != "unlabeled":
                    label = f"{file.parent.name}\n".encode()
                    members.append((name.rpartition(".")[0] + ".cls", label))
            write_tar(target / f"{part}-{number:03}.tar", members)
    return target


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    picture(number).save(out, "jpeg")
    return out.getvalue()


def refusal(function: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        function()
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def scan_members(path: Path, split: str = "unlabeled") -> tuple[list[str], Ignored]:
    ignored = Ignored()
    rows = scan_shard(str(path), split, ignored)
    return [f"{row.member} {row.label}".strip() for row in rows], ignored


def members_of(path: Path) -> list[Member]:
    rows = scan_shard(str(path), "unlabeled", Ignored())
    return [row.image for row in rows if isinstance(row.image, Member)]
