"""Members of tar files: found, read by offset, and refused by name."""

from __future__ import annotations

import gzip
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from simpro_fast.data.files.decode import check_file, read_header, read_rgb
from simpro_fast.data.files.tar_index import FILE, Member, tar_entries
from simpro_fast.utils import local_files
from simpro_fast.utils.errors import UserError
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import jpeg, members_of, refusal, scan_members, write_tar

LONG = "a/" * 60 + "0001.jpg"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_read_where_tarfile_finds_them(tmp_path: Path, form: int) -> None:
    """Every header form, long names and names that are no ASCII, against the standard library."""
    names = ["0001.jpg", "./b/0002.jpg", "ü/0003.jpg", LONG, "empty.jpg"]
    contents = [jpeg(i) for i in range(4)] + [b""]
    path = write_tar(tmp_path / "x.tar", zip(names, contents, strict=True), form=form)
    with tarfile.open(path) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    found = [(entry.name, entry.offset, entry.length) for entry in tar_entries(str(path))]
    assert found == expected and [name for name, _, _ in found] == names
    for (name, offset, length), content in zip(found, contents, strict=True):
        member = Member(str(path), name, offset, length)
        assert member.read_bytes() == content
        with member.open() as file:
            assert file.read() == content
    picture_of = Member(str(path), *found[0])
    alone = save(tmp_path / "alone.jpg", picture(0))
    assert check_file(picture_of) == check_file(alone)
    assert read_header(picture_of) == read_header(alone)
    assert np.array_equal(np.asarray(read_rgb(picture_of)), np.asarray(read_rgb(alone)))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7"])
def test_what_the_tar_command_writes(tmp_path: Path, form: str) -> None:
    root = tidy(tmp_path, unlabeled=3)
    if form in ("gnu", "pax"):
        save(root / "unlabeled" / ("d" * 90) / ("f" * 90 + ".jpg"), picture(5))
    done = subprocess.run(
        ["tar", f"--format={form}", "-cf", "x.tar", "-C", "unlabeled", "."], cwd=root, check=False
    )
    assert done.returncode == 0
    members = {m.name.removeprefix("./"): m for m in members_of(root / "x.tar")}
    files = [path for path in (root / "unlabeled").rglob("*") if path.is_file()]
    assert members.keys() == {str(f.relative_to(root / "unlabeled")) for f in files}
    for file in files:
        member = members[str(file.relative_to(root / "unlabeled"))]
        assert member.read_bytes() == file.read_bytes()


def test_names_never_become_paths(tmp_path: Path) -> None:
    outside = tmp_path / "outside.jpg"
    names = ["../outside.jpg", str(outside), "a/../../outside2.jpg"]
    path = write_tar(tmp_path / "in/x.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    before = sorted(tmp_path.rglob("*"))
    members = members_of(path)
    assert [check_file(member).status for member in members] == ["ok"] * 3
    assert sorted(tmp_path.rglob("*")) == before and not outside.exists()


def test_broken_shards_are_named(tmp_path: Path) -> None:
    members = [(f"{i:04}.jpg", jpeg(i)) for i in range(4)]
    good = write_tar(tmp_path / "good.tar", members).read_bytes()
    entries = list(tar_entries(str(tmp_path / "good.tar")))
    border = entries[2].offset - 512
    damaged = bytearray(good)
    damaged[border + 3] ^= 1
    huge = bytearray(good)
    huge[border + 124 : border + 136] = b"77777777777\0"
    huge[border + 148 : border + 156] = b" " * 8
    huge[border + 148 : border + 156] = b"%06o\0 " % sum(huge[border : border + 512])
    cases = {
        "cut.tar": (good[: entries[3].offset + 100], "damaged, cut short"),
        "border.tar": (good[:border], "cut short, its end mark is missing"),
        "header.tar": (good[: border + 100], "damaged"),
        "flip.tar": (bytes(damaged), "damaged, or goes on after its end"),
        "huge.tar": (bytes(huge), "damaged, cut short"),
        "two.tar": (good + good, "damaged, or goes on after its end"),
        "empty.tar": (b"", "damaged, cut short"),
        "text.tar": (b"no tar at all" * 100, "damaged, cut short or no uncompressed tar"),
        "gz.tar": (gzip.compress(good), "damaged, cut short or no uncompressed tar"),
    }
    for name, (content, part) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        said = refusal(lambda path=path: scan_members(path))  # type: ignore[misc]
        assert said.startswith(f"{path}: {part}"), said
    assert [entry.name for entry in entries] == [name for name, _ in members]


def test_any_damage_is_a_refusal_or_a_member_inside_the_file(tmp_path: Path) -> None:
    """Bytes changed, cut or taken out, header fields rewritten under a right checksum."""
    rng = random.Random(1)
    names = ["a/1.jpg", "ü.jpg", LONG, "2.cls"]
    bases = [
        write_tar(tmp_path / "good.tar", [(n, rng.randbytes(900)) for n in names], form=form)
        .read_bytes()
        for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    ]  # fmt: skip
    path, refused = tmp_path / "x.tar", 0
    for round_ in range(400):
        data = bytearray(bases[round_ % 3])
        place = rng.randrange(len(data))
        if round_ % 4 == 0:
            data[place] ^= rng.randrange(1, 256)
        elif round_ % 4 == 1:
            del data[place : place + rng.choice((1, 512, len(data)))]
        else:
            start = place // 512 * 512
            field, length = rng.choice(((0, 100), (124, 12), (156, 1), (257, 8), (345, 155)))
            values = (0, 48, 55, 128, 255, rng.randrange(256))
            data[start + field : start + field + length] = rng.choices(values, k=length)
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
        path.write_bytes(data)
        try:
            for entry in tar_entries(str(path)):
                if entry.kind == FILE:
                    Member(str(path), entry.name, entry.offset, entry.length).read_bytes()
        except UserError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1 and str(path) in str(error)
    assert 100 < refused < 400


def test_hostile_extension_headers_end(tmp_path: Path) -> None:
    """Lengths below zero, and chains: `tarfile` of old recurses or never ends."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("0001.jpg")
        info.pax_headers = {"size": "-512", "comment": "c"}
        tar.addfile(info)
    chain = tarfile.TarInfo("x")
    chain.type, chain.size = tarfile.XHDTYPE, 0
    (tmp_path / "y.tar").write_bytes(chain.tobuf() * 5000 + bytes(1024))
    for name in ("x.tar", "y.tar"):
        assert refusal(lambda name=name: scan_members(tmp_path / name))  # type: ignore[misc]


def test_member_whose_change_could_not_be_noticed_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("0001.jpg")
        info.pax_headers = {"path": "0002.jpg"}
        tar.addfile(info)
    assert "member 0002.jpg has an odd header" in refusal(lambda: scan_members(tmp_path / "x.tar"))


def test_member_that_moved_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard written anew must not give another picture under an old place."""
    monkeypatch.setattr(local_files, "PAUSES", (0.0,))
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpeg(1)), ("2.jpg", jpeg(2))])
    first, second = members_of(path)
    assert first.read_bytes() and second.read_bytes()
    with path.open("r+b") as file:
        file.truncate(second.offset + 10)
    with pytest.raises(OSError, match="ends within this member"):
        second.read_bytes()
    write_tar(path, [("1.jpg", jpeg(1)), ("new.jpg", jpeg(2))])
    assert first.read_bytes() == jpeg(1)
    for look in (second.read_bytes, second.verify, second.open):
        with pytest.raises(OSError, match="changed since it was listed"):
            look()
    status = "unreadable: the shard has changed since it was listed"
    assert check_file(second).status == read_header(second).status == status
    with pytest.raises(UserError, match=f"^{path} member 2.jpg: {status}"):
        read_rgb(second)
    path.unlink()
    assert check_file(first).status == "unreadable: No such file or directory"
