"""What the sources of a prediction yield: order, names, odd files; no list of them in memory."""

from __future__ import annotations

import io
import os
import tracemalloc
from pathlib import Path

import pytest

from simpro_fast.answers.sources import Sources, split_names
from simpro_fast.data.files.manifest import Row, make_manifest, write_manifest
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.image_folders import picture, save
from tests.data.tar_shards import jpeg, write_tar


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `photos/` in it."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("b/2.jpg", "b/10.png", "a é.jpg", "c.jpeg")):
        save(Path("photos") / name, picture(i))
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    write_tar(tmp_path / "photos" / "b" / "shard.tar", [("x/1.jpg", jpeg(7)), ("x/2.jpg", jpeg(8))])
    return tmp_path


def names(*arguments: str, base: Path | None = None, given: bytes = b"") -> list[str]:
    return [
        f"{item.path}|{item.member}" if item.member else item.path
        for item in Sources(arguments, base, io.BytesIO(given))
    ]


BELOW_B = [
    "photos/b/10.png",
    "photos/b/2.jpg",
    "photos/b/shard.tar|x/1.jpg",
    "photos/b/shard.tar|x/2.jpg",
]


def test_folders_patterns_and_shards_come_in_their_order(photos: Path) -> None:
    assert names("photos") == ["photos/a é.jpg", *BELOW_B, "photos/c.jpeg"]
    assert names("photos/b/", "photos/c.jpeg") == [*BELOW_B, "photos/c.jpeg"]
    assert names("photos/*.jp*g") == ["photos/a é.jpg", "photos/c.jpeg"]
    assert names("photos/**/*.png") == ["photos/b/10.png"]
    assert names("photos/b/{2.jpg,10.png}") == ["photos/b/2.jpg", "photos/b/10.png"]
    assert names(str(photos / "photos" / "c.jpeg")) == [f"{photos}/photos/c.jpeg"]
    assert names("photos/c.jpeg", "photos/b/2.jpg", base=Path("photos/b")) == ["../c.jpeg", "2.jpg"]
    sources = Sources(["photos"], None, io.BytesIO())
    assert len(list(sources)) == 6 and sources.ignored.lines()[0].startswith("1 not an image")


def test_a_list_on_standard_input(photos: Path) -> None:
    given = b"\xef\xbb\xbfphotos/c.jpeg\r\n\nphotos/a \xc3\xa9.jpg\nphotos/b/shard.tar\nnowhere.jpg"
    assert names("-", given=given) == [
        "photos/c.jpeg",
        "photos/a é.jpg",
        *BELOW_B[2:],
        "nowhere.jpg",
    ]
    assert names("photos/c.jpeg", "-", given=b"odd\nname.jpg\0\xff.jpg\0") == [
        "photos/c.jpeg",
        "odd\nname.jpg",
        os.fsdecode(b"\xff.jpg"),
    ]
    assert names("-") == []


class OneByOne(io.RawIOBase):
    """A stream that gives a byte at a time, as a slow writer does."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def read1(self, size: int) -> bytes:
        return bytes([byte for _, byte in zip(range(1), self._data, strict=False)])


def test_names_do_not_depend_on_the_blocks_they_come_in() -> None:
    assert list(split_names(OneByOne(b"a\0b c\0d"))) == ["a", "b c", "d"]  # type: ignore[arg-type]
    assert list(split_names(OneByOne("é\r\nb\n".encode()))) == ["é", "b"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["list.csv", "list.parquet"])
def test_a_manifest_comes_as_it_is_listed(photos: Path, name: str) -> None:
    *_, item = Sources(["photos/b/shard.tar"], None, io.BytesIO())
    shard = item.image
    assert isinstance(shard, Member)
    rows = [
        Row(f"{photos}/photos/c.jpeg", "", "unlabeled", width=44, height=36),
        Row(f"{photos}/photos/b/2.jpg", "cat", "labeled", status="damaged: once"),
        Row(
            f"{photos}/photos/b/shard.tar",
            "",
            "unlabeled",
            bytes=shard.length,
            member="x/2.jpg",
            offset=shard.offset,
        ),
    ]
    manifest = make_manifest(photos / "lists", rows)
    (photos / "lists").mkdir()
    write_manifest(manifest, photos / "lists" / name)
    found = names(f"lists/{name}")
    assert sorted(found) == ["photos/b/2.jpg", "photos/b/shard.tar|x/2.jpg", "photos/c.jpeg"]
    assert names(str(photos / "lists" / name)) == [f"{photos}/{path}" for path in found]
    if name.endswith(".csv"):  # by hand: no order is made, and an image may come twice
        Path("hand.csv").write_text("path\nphotos/c.jpeg\nphotos/a é.jpg\nphotos/c.jpeg\n")
        sources = Sources(["hand.csv"], None, io.BytesIO())
        assert [item.path for item in sources] == [
            "photos/c.jpeg",
            "photos/a é.jpg",
            "photos/c.jpeg",
        ]
        assert sources.repeats == 1


def test_repeats_have_a_place_each_and_are_counted(photos: Path) -> None:
    sources = Sources(["photos/b", "photos/b/2.jpg", "-"], None, io.BytesIO(b"./photos/b/2.jpg\n"))
    assert [item.path for item in sources].count("photos/b/2.jpg") == 2
    assert sources.repeats == 2
    assert Sources(["photos"], None, io.BytesIO()).repeats == 0


def test_a_damaged_shard_is_one_item_and_the_others_go_on(photos: Path) -> None:
    shard = photos / "photos" / "b" / "shard.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    items = list(Sources(["photos"], None, io.BytesIO()))
    (bad,) = [item for item in items if item.image is None]
    assert (bad.path, bad.member) == ("photos/b/shard.tar", "")
    assert bad.status.startswith("damaged: ")
    assert items[-1].path == "photos/c.jpeg"


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["nothing.jpg"], UserError, "nothing.jpg: does not exist"),
        (["photos/*.bmp"], UserError, "nothing matches"),
        (["s3://bucket/photos"], ConfigError, "mount or copy it"),
        (["-", "-"], ConfigError, "read once"),
        (["photos/notes.txt"], ConfigError, "- < photos/notes.txt"),
        (["pipe"], UserError, "is a pipe"),
    ],
)
def test_what_no_images_can_come_from(
    photos: Path, arguments: list[str], kind: type[UserError], said: str
) -> None:
    os.mkfifo(photos / "pipe")
    with pytest.raises(kind, match=said) as caught:
        Sources(arguments, None, io.BytesIO())
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_sixty_thousand_paths_are_never_in_memory() -> None:
    class Names(io.RawIOBase):
        left = 60_000

        def read1(self, size: int) -> bytes:
            block = range(self.left, max(self.left - 500, 0), -1)
            self.left = max(self.left - 500, 0)
            lines = (f"photos/a folder of some depth/image {i:09}.jpg\n" for i in block)
            return "".join(lines).encode()

    tracemalloc.start()
    try:
        sources = Sources(["-"], None, Names())  # type: ignore[arg-type]
        count = sum(1 for _ in sources)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 60_000
    assert peak < 2 * 2**20  # 8 bytes each; as text they are 6 MB
