"""Attacks by pictures: wrong sizes, damage, orientation."""

from __future__ import annotations

import csv
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from simpro_fast.data.files.decode import OK, REFUSED, check_file, read_header, read_rgb
from simpro_fast.data.pipeline.file_graph import GraphDecoder
from simpro_fast.utils.errors import UserError
from tests.data.file_loaders import loader
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import as_shards
from tests.survival.attack import Attempt, in_own_process, trial, wrong_line
from tests.survival.prepared import make_manifest


def _edit(manifest: Path, name: str, **columns: object) -> None:
    """Change the row of a file in a manifest, as an editor would."""
    with manifest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["path"].endswith(name):
            row.update({key: str(value) for key, value in columns.items()})
    with manifest.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _error(root: Path, victim: Path | None = None, content: bytes = b"", **changes: object) -> str:
    """The error with which training ends.

    Args:
        victim, content: a file that is overwritten once training has begun.
    """
    if "manifest" in changes:
        changes = {"labeled": None, "unlabeled": (), **changes}
    try:
        with loader(root, prefetch=1, **changes) as made:
            for step in range(12):
                if step == 1 and victim is not None:
                    victim.write_bytes(content)
                made.next(step)
    except UserError as error:
        return str(error)
    return "no error"


def _train_on_other_sizes(place: str) -> list[tuple[str, str, list[str]]]:
    """(what, the error, what it must name) of each attempt."""
    root = tidy(Path(place), unlabeled=24)
    manifest = make_manifest(root)
    whole = manifest.read_bytes()
    victim = root / "unlabeled/007.jpg"
    found = []
    for width, height in ((200, 40), (24, 24), (10**6, 10**6), (40, 38)):
        _edit(manifest, victim.name, width=width, height=height)
        error = _error(root, manifest=manifest)
        found.append((f"{width} x {height} listed", error, [f"{width} x {height} listed"]))
        _edit(manifest, victim.name, sha256="")
        error = _error(root, manifest=manifest)
        found.append(("the same, without a hash", error, [f"{width} x {height} listed"]))
        manifest.write_bytes(whole)
    good = victim.read_bytes()
    others = {
        "16 pixels": save(root / "small.jpg", picture(1, 16, 16)).read_bytes(),
        "400 pixels": save(root / "large.png", picture(1, 400, 300)).read_bytes(),
        "a text": b"this is no picture",
        "nothing": b"",
    }
    for what, content in others.items():
        for mode in ("error", "skip"):
            if what not in ("a text", "nothing") or mode == "error":
                error = _error(root, victim, content, on_bad_image=mode)
                found.append((f"{what} in place of a file, {mode}", error, [victim.name]))
                victim.write_bytes(good)
    tars = as_shards(root, root / "tars")
    shard = tars / "unlabeled-000.tar"
    whole = shard.read_bytes()
    place = whole.index(good)
    small = others["16 pixels"]
    other = whole[:place] + small + b"\0" * (len(good) - len(small)) + whole[place + len(good) :]
    error = _error(tars, shard, other)
    found.append(("16 pixels in place of a member", error, [str(shard), victim.name]))
    return found


@trial("wrong sizes")
def sizes_that_are_not_the_listed_ones(folder: Path) -> Iterator[Attempt]:
    """A crop that begins outside the picture crashes the process unless it is noticed before."""
    for what, error, words in in_own_process(_train_on_other_sizes, folder):
        yield Attempt(what, wrong_line(error, *words))


def _damaged(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Copies with a flipped bit, a burst of noise, or cut short."""
    rng = random.Random(seed)
    for i in range(count):
        place, noise = rng.randrange(len(content)), rng.randbytes(rng.randrange(1, 20))
        if i % 3 == 0:
            yield content[:place] + bytes([content[place] ^ 1 << i % 8]) + content[place + 1 :]
        elif i % 3 == 1:
            yield content[:place] + noise + content[place + len(noise) :]
        else:
            yield content[: -rng.choice((1, 4, 12, 40))]


@trial("damaged pictures")
def what_prepare_calls_good_is_what_training_and_evaluation_read(folder: Path) -> Iterator[Attempt]:
    decoder, other = (GraphDecoder() for _ in range(2))
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "JPEG": ("jpeg", {"exif": exif}),
        "progressive JPEG": ("jpeg", {"progressive": True}),
        "PNG": ("png", {}),
        "BMP": ("bmp", {}),
        "WebP": ("webp", {}),
        "lossless WebP": ("webp", {"lossless": True}),
    }
    path = folder / "x.jpg"
    for kind, (form, options) in kinds.items():
        content = save(path, picture(5), format=form, **options).read_bytes()
        certified = refused_ones = 0
        complaint = None
        for number, damaged in enumerate(_damaged(content, 150, len(kind))):
            path.write_bytes(damaged)
            facts = check_file(path, decoder)
            refused_ones += facts.status != OK
            if facts.status == OK:
                certified += 1
                evaluated = read_rgb(path, (facts.width, facts.height))
                trained = other(damaged, facts.width, facts.height)
                if trained is None or np.abs(np.asarray(evaluated) - trained.astype(int)).max() > 1:
                    complaint = f"{number} is certified and read differently"
        if form == "png" and certified:
            complaint = f"{certified} certified in spite of their checksums"
        yield Attempt(f"{kind}, 150 damaged", complaint)
        assert refused_ones, "nothing was damaged"


def _bmp(bits: int, compression: int) -> bytes:
    """8 x 4 pixels of 16 bits, which Pillow reads."""
    pixels = bytes(range(8 * 4 * bits // 8))
    info = struct.pack("<IiiHHIIiiII", 40, 8, 4, 1, bits, compression, len(pixels), 0, 0, 0, 0)
    start = 14 + len(info)
    return struct.pack("<2sIHHI", b"BM", start + len(pixels), 0, 0, start) + info + pixels


@trial("damaged pictures")
def pictures_that_decoders_disagree_about(folder: Path) -> Iterator[Attempt]:
    decoder = GraphDecoder()
    png = save(folder / "good.png", picture(6)).read_bytes()
    for name, content in (("no_end.png", png[:-12]), ("rgb555.bmp", _bmp(16, 0))):
        path = folder / name
        path.write_bytes(content)
        status = check_file(path, decoder).status
        yield Attempt(name, None if status == REFUSED else f"is called {status}")


def _app1(payload: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload


def _exif(order: str, kind: int, value: int, *more: tuple[int, int]) -> bytes:
    """An EXIF block with an orientation tag of this TIFF type, and others."""
    sign = "<" if order == "II" else ">"
    form = {1: "B3x", 2: "B3x", 3: "H2x", 4: "I", 8: "h2x", 9: "i"}
    table = struct.pack(f"{sign}H", 1 + len(more))
    for entry_kind, entry in ((kind, value), *more):
        table += struct.pack(f"{sign}HHI{form[entry_kind]}", 0x0112, entry_kind, 1, entry)
    return _app1(b"Exif\0\0" + order.encode() + struct.pack(f"{sign}HI", 42, 8) + table + bytes(4))


def _xmp(value: int) -> bytes:
    return _app1(
        b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
        b'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
        b'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/>'
        b"</rdf:RDF></x:xmpmeta>" % value
    )


@trial("orientation")
def one_orientation_for_training_and_evaluation(folder: Path) -> Iterator[Attempt]:
    """Either both see the same picture, turned by the EXIF block alone, or the file is refused."""
    decoder = GraphDecoder()
    path = save(folder / "plain.jpg", picture(5, 44, 36))
    plain, content = read_rgb(path), path.read_bytes()
    wide, tall = plain.size, plain.size[::-1]
    cases: dict[str, tuple[bytes, tuple[int, int] | None]] = {
        "XMP alone, 6": (_xmp(6), wide),
        "XMP alone, 3": (_xmp(3), wide),
        "XMP 6 beside EXIF 1": (_exif("II", 3, 1) + _xmp(6), wide),
        "XMP 3 before EXIF 6": (_xmp(3) + _exif("II", 3, 6), tall),
        "two EXIF blocks, 6 and 3": (_exif("II", 3, 6) + _exif("II", 3, 3), None),
        "two EXIF blocks, 1 and 6": (_exif("II", 3, 1) + _exif("II", 3, 6), None),
        "two tags, 6 and 1": (_exif("II", 3, 6, (3, 1)), tall),
        "an order of bytes that is none": (_exif("II", 3, 6).replace(b"II*", b"XX*"), wide),
        "a table that is cut": (_app1(b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12"), wide),
        "an offset beyond the block": (_app1(b"Exif\0\0II*\0\xff\xff\xff\xff"), wide),
    }
    for order in ("II", "MM"):
        for value in range(10):
            size = tall if value in (5, 6, 7, 8) else wide
            cases[f"{order} SHORT {value}"] = (_exif(order, 3, value), size)
        for kind in (1, 2, 4, 8, 9):
            cases[f"{order} of TIFF type {kind}"] = (_exif(order, kind, 6), None)
    for what, (block, size) in cases.items():
        path.write_bytes(content[:2] + block + content[2:])
        facts = check_file(path, decoder)
        complaint = None if read_header(path).status == facts.status else "the header says other"
        if size is None and not facts.status.startswith("unsupported: JPEG with "):
            complaint = f"is called {facts.status}"
        elif size is not None and (facts.status != OK or read_rgb(path).size != size):
            complaint = f"is called {facts}"
        elif size == wide and what.startswith(("XMP", "an ", "a ")):
            complaint = None if read_rgb(path).tobytes() == plain.tobytes() else "is turned"
        yield Attempt(what, complaint)
