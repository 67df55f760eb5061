"""HEIC: packing reads it where pillow-heif is installed, training from files never."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simpro_fast.cli import prepare
from simpro_fast.config import parse_config
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files import decode
from simpro_fast.data.files.decode import check_file, read_header, read_rgb
from simpro_fast.data.files.manifest import read_manifest
from simpro_fast.data.files.square import read_square
from simpro_fast.utils.errors import UserError
from tests.conftest import TINY
from tests.data.image_folders import picture, save, tidy

CURE = "unsupported: HEIC, which the decoder of training cannot read; convert it to JPEG, or train"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pillow_heif = pytest.importorskip("pillow_heif")
    root = tidy(tmp_path / "photos", unlabeled=4)
    exif = Image.Exif()
    exif[0x0112] = 6
    for number, name in enumerate(("IMG_1.HEIC", "b.heif")):
        file = pillow_heif.from_pillow(picture(500 + number, 60, 40))
        file.save(root / "unlabeled" / name, quality=-1, chroma=444, exif=exif.tobytes())
    return root


@pytest.fixture
def without_pillow_heif(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decode._no_heif.cache_clear()
    yield
    decode._no_heif.cache_clear()


def run(root: Path, *arguments: str) -> int:
    folders = [f"--labeled={root}/labeled", f"--unlabeled={root}/unlabeled", f"--val={root}/val"]
    return prepare.main([*folders, f"--output={root}/out", "--threads=2", *arguments])


def test_files_and_headers_are_refused_with_the_cure(root: Path, tmp_path: Path) -> None:
    heic = root / "unlabeled/IMG_1.HEIC"
    disguised = heic.rename(tmp_path / "phone.jpg")
    for path in (root / "unlabeled/b.heif", disguised):
        for facts in (read_header(path), check_file(path)):
            assert facts.status.startswith(CURE)
    assert check_file(disguised, packing=True).status.startswith(CURE), "by its name it is none"
    with pytest.raises(UserError, match=r"phone\.jpg: unsupported: HEIC"):
        read_rgb(disguised)


def test_photo_is_read_upright(root: Path) -> None:
    """As a phone turns it: in the container, and in an EXIF tag that must not turn it again."""
    path = root / "unlabeled/IMG_1.HEIC"
    assert b"irot" in path.read_bytes()
    facts = check_file(path, packing=True)
    assert (facts.status, facts.width, facts.height) == ("ok", 40, 60)
    upright = picture(500, 60, 40).transpose(Image.Transpose.ROTATE_270)
    decoded = np.asarray(read_rgb(path, (40, 60)), np.int64)
    assert np.abs(decoded - np.asarray(upright, np.int64)).mean() < 2
    with pytest.raises(UserError, match="40 x 60 pixels, 60 x 40 listed"):
        read_rgb(path, (60, 40))
    half = root / "half.heic"
    half.write_bytes(path.read_bytes()[:-300])
    assert check_file(half, packing=True).status.startswith("damaged: ")


def test_deep_colour_is_refused(root: Path) -> None:
    import pillow_heif

    deep = np.full((40, 60, 3), 50_000, np.uint16)
    pillow_heif.encode(
        "RGB;16", (60, 40), deep.tobytes(), str(root / "deep.heic"), quality=90, bit_depth=10
    )
    assert "-bit HEIC; convert it to 8 bits" in check_file(root / "deep.heic", packing=True).status


def test_packing_reads_it_and_training_from_files_does_not(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root) == 1, "without --pack nothing could train on it"
    said = capsys.readouterr()
    assert said.out.count(CURE) == 2 and "2 of 24 files cannot be used" in said.err
    assert run(root, "--pack=16", f"--init-config={root}/own.yaml") == 0
    assert "2 HEIC image(s) can be trained on from the packed array" in capsys.readouterr().out
    manifest = read_manifest(root / "out/manifest.csv")
    assert sum("unlabeled" in row.path for row in manifest.usable().rows) == 6
    own = {"name": "images", "manifest": f"{root}/out/manifest.csv", "image_size": 16}
    own |= {"test_per_class": None}
    packed = parse_config({**TINY, "data": {**own, "packed": f"{root}/out/packed_16.npy"}})
    images = load_dataset(packed.data).images
    assert len(images) == len(manifest.rows)
    place = next(i for i, row in enumerate(manifest.rows) if row.path.endswith(".HEIC"))
    seen = read_square(Path(manifest.rows[place].path), Square(16))
    assert np.array_equal(images[place], seen), "as prediction sees it"
    files = parse_config({**TINY, "data": own})
    with pytest.raises(UserError, match=r"IMG_1\.HEIC: unsupported: HEIC.*prepare --pack"):
        load_dataset(files.data)
    assert run(root) == 1, "an earlier look with --pack is not remembered for one without"


def test_without_the_package_its_name_is_the_cure(
    root: Path, without_pillow_heif: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, "--pack=16") == 1
    said = capsys.readouterr().out
    assert said.count("unsupported: HEIC needs pillow-heif: `pip install") == 2
    assert "`pip install 'pillow-heif>=0.20'`" in said


def test_other_files_by_its_name_are_what_they_are(root: Path) -> None:
    path = save(root / "jpeg.heic", picture(1), format="jpeg")
    assert check_file(path).status == "ok" == read_header(path).status
    (root / "note.heic").write_text("a note that is long enough")
    assert check_file(root / "note.heic", packing=True).status.startswith("damaged: not an image")
