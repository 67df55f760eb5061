"""Training batches from tar shards: those of the same images in files."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from simpro_fast.data.files.scan_shards import scan_shard
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils import local_files
from simpro_fast.utils.errors import UserError
from tests.data.file_loaders import BATCH, assert_same, batches, loader
from tests.data.image_folders import every_kind, tidy
from tests.data.tar_shards import as_shards, write_tar


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kind(tmp_path_factory.mktemp("own"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return as_shards(tidy(tmp_path / "data"), tmp_path / "tars")


def member_of(image: str) -> Member:
    """What the name in a message stands for."""
    shard, _, name = image.partition(" member ")
    rows = scan_shard(shard, "unlabeled", Ignored())
    (found,) = [row.image for row in rows if row.member == name]
    assert isinstance(found, Member)
    return found


def spoil(image: str) -> None:
    """Damage the pixels of a member in place."""
    member = member_of(image)
    half = member.length // 2
    with open(member.shard, "r+b") as file:
        file.seek(member.offset + half)
        file.write(bytes(member.length - half))


@pytest.mark.parametrize("mixed", [False, True])
def test_batches_from_shards_are_those_from_files(
    shared: Path, tmp_path: Path, mixed: bool
) -> None:
    """Shards in place of all folders, or of unlabeled ones: bit-equal, from any step, any ranks."""
    tars = as_shards(shared, tmp_path / "tars")
    arguments: dict[str, Any] = {"root": tars}
    if mixed:
        arguments["labeled"] = shared / "labeled"
    whole = batches(shared, 6)
    for expected, found in zip(whole, batches(steps=6, **arguments), strict=True):
        assert_same(found, expected)
    for expected, found in zip(
        whole[4:], batches(steps=2, start=4, prefetch=3, **arguments), strict=True
    ):
        assert_same(found, expected)
    halves = [batches(steps=2, rank=rank, world_size=2, **arguments) for rank in range(2)]
    plain = [batches(shared, 2, rank=rank, world_size=2) for rank in range(2)]
    for half, other in zip(halves, plain, strict=True):
        for found, expected in zip(half, other, strict=True):
            assert_same(found, expected)


def test_closed_loader_leaves_no_reading_thread(shards: Path) -> None:
    before = set(threading.enumerate())
    with loader(shards, num_threads=3) as made:
        made.next(0)
        assert len(set(threading.enumerate()) - before) == 3
    assert set(threading.enumerate()) == before


def test_damaged_member_stops_the_run_with_shard_and_name(shards: Path) -> None:
    with loader(shards, start=3) as made:
        bad = made.describe(3)["paths"][-1]
        spoil(bad)
        with pytest.raises(UserError, match=f"data of step 3: {re.escape(bad)}: damaged") as caught:
            made.next(3)
        assert "/unlabeled-00" in bad and ".tar member 0" in bad
        assert len(str(caught.value).splitlines()) == 1


def test_skipped_members_are_replaced_as_files_are(shards: Path, tmp_path: Path) -> None:
    files = tmp_path / "data"
    with loader(shards) as made:
        bad = made.describe(1)["paths"][BATCH + 2]
    spoil(bad)
    name = bad.partition(" member ")[2]
    (files / "unlabeled" / name).write_bytes(member_of(bad).read_bytes())
    counted = []
    for root in (shards, files):
        with loader(root, on_bad_image="skip") as made:
            found = [made.next(step) for step in range(4)]
            told = [made.describe(step)["paths"] for step in range(4)]
            counted.append((found, made.replaced))
        assert not any(path.endswith(name) for step in told for path in step)
    (from_shards, replaced), (from_files, expected) = counted
    assert replaced == expected > 0
    for a, b in zip(from_shards, from_files, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("change", ["gone", "rewritten"])
def test_shard_that_vanished_or_changed_stops_even_when_skipping(
    shards: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "PAUSES", (0.0,))
    with loader(shards, on_bad_image="skip", prefetch=1) as made:
        made.next(0)
        for path in shards.glob("unlabeled-*.tar"):
            if change == "gone":
                path.unlink()
            else:
                write_tar(path, [(f"{i}.jpg", b"x" * 9000) for i in range(8)])
        reason = "No such file" if change == "gone" else "the shard has changed"
        with pytest.raises(UserError, match=rf"unlabeled-00\d\.tar member \d+\.jpg: .*{reason}"):
            for step in range(1, 9):
                made.next(step)
