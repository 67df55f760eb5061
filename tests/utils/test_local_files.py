"""Reads that fail for a moment are repeated; paths of other machines are told."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpro_fast.answers.sources import Sources
from simpro_fast.cli.entry import main
from simpro_fast.config import parse_config
from simpro_fast.data.files import decode
from simpro_fast.utils import local_files
from simpro_fast.utils.errors import ConfigError, UserError
from tests.conftest import TINY


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), (9, 8, 7)).save(path)
    return path


class Failing(io.BytesIO):
    """A file whose bytes cannot be read any more, after it was opened."""

    def read(self, *_: Any) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")


READERS: list[Callable[[Path], Any]] = [
    decode.read_rgb,
    decode.read_header,
    decode.check_file,
    decode.encoded_bytes,
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("failures", [2, 3])
def test_three_tries(
    picture: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any], failures: int
) -> None:
    monkeypatch.setattr(local_files, "PAUSES", (0.0, 0.0))
    opened = [0]
    real = decode.open_regular

    def open_(path: Path) -> Any:
        opened[0] += 1
        return Failing(path.read_bytes()) if opened[0] <= failures else real(path)

    monkeypatch.setattr(decode, "open_regular", open_)
    monkeypatch.setattr(decode, "read_regular", lambda path: open_(path).read())
    before = local_files.repeated.count
    try:
        found = read(picture)
        said = getattr(found, "status", "ok")
    except (UserError, OSError) as error:
        said = str(error)
    assert opened[0] == 3 and local_files.repeated.count == before + 2
    assert (said == "ok") == (failures == 2), said
    assert failures == 2 or "Stale file handle" in said


def test_what_is_damaged_is_not_read_again(picture: Path) -> None:
    picture.write_bytes(picture.read_bytes()[:40])
    before = local_files.repeated.count
    assert decode.check_file(picture).status.startswith("damaged")
    assert local_files.repeated.count == before


@pytest.mark.parametrize("path", ["s3://bucket/photos", "gs:/bucket", "pipe:cat x"])
def test_paths_of_other_machines_are_told(
    path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for make in (
        lambda: parse_config({**TINY, "data": {**TINY["data"], "root": path}}),
        lambda: Sources([path], None, io.BytesIO()),
    ):
        with pytest.raises(ConfigError, match="mount or copy it"):
            make()
    assert main(["prepare", "--labeled", path, "--output", str(tmp_path / "out")]) == 2
    assert "mount or copy it" in capsys.readouterr().err


def test_a_folder_of_such_a_name_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old:").mkdir()
    Path("old:/photos").mkdir()
    assert local_files.remote("old:/photos") is None
