"""Writes small CIFAR archives in the published format: pickle protocol 2 as Python 2 wrote it."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np


def _text(value: str | bytes) -> bytes:
    raw = value.encode("latin1") if isinstance(value, str) else value
    if len(raw) < 256:
        return b"U" + bytes([len(raw)]) + raw  # SHORT_BINSTRING
    return b"T" + struct.pack("<i", len(raw)) + raw  # BINSTRING


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])  # BININT1
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)  # BININT2
    return b"J" + struct.pack("<i", value)  # BININT


def _array(value: np.ndarray) -> bytes:
    assert value.dtype == np.uint8
    rebuilt = b"cnumpy.core.multiarray\n_reconstruct\n"
    rebuilt += b"cnumpy\nndarray\n" + _integer(0) + b"\x85" + _text("b") + b"\x87R"
    shape = b"".join(_integer(n) for n in value.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + _text("u1") + _integer(0) + _integer(1) + b"\x87R"
    dtype += b"(" + _integer(3) + _text("|") + b"NNN" + 2 * _integer(-1) + _integer(0) + b"tb"
    return rebuilt + b"(" + _integer(1) + shape + dtype + b"\x89" + _text(value.tobytes()) + b"tb"


def _value(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_value, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_value(k) + _value(v) for k, v in value.items()) + b"u"
    if isinstance(value, (str, bytes)):
        return _text(value)
    assert isinstance(value, int)
    return _integer(value)


def python2_pickle(value: object) -> bytes:
    return b"\x80\x02" + _value(value) + b"."


def cifar_images(count: int, seed: int) -> np.ndarray:
    """uint8 [count, 3072], channel-planar as in the archive."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def cifar10_members(per_class: int = 2) -> dict[str, bytes]:
    """The archive's files by name; every batch holds `per_class` images of each class."""
    members = {
        "batches.meta": python2_pickle(
            {
                "num_cases_per_batch": 10 * per_class,
                "label_names": [f"class {k}" for k in range(10)],
                "num_vis": 3072,
            }
        )
    }
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        members[name] = python2_pickle(
            {
                "batch_label": f"batch {seed}",
                "labels": list(range(10)) * per_class,
                "data": cifar_images(10 * per_class, seed),
                "filenames": [f"image_{i}.png" for i in range(10 * per_class)],
            }
        )
    return members


def cifar100_members(per_class: int = 1) -> dict[str, bytes]:
    """`per_class` images of each of the 100 classes in both parts."""
    count = 100 * per_class
    members = {
        "meta": python2_pickle(
            {
                "fine_label_names": [f"fine {k}" for k in range(100)],
                "coarse_label_names": [f"coarse {k}" for k in range(20)],
            }
        )
    }
    for seed, name in enumerate(["train", "test"]):
        members[name] = python2_pickle(
            {
                "filenames": [f"image_{i}.png" for i in range(count)],
                "batch_label": f"{name} part",
                "fine_labels": list(range(100)) * per_class,
                "coarse_labels": [k % 20 for k in range(100)] * per_class,
                "data": cifar_images(count, seed),
            }
        )
    return members


def write_folder(root: Path, folder: str, members: dict[str, bytes]) -> None:
    (root / folder).mkdir(parents=True)
    for name, content in members.items():
        (root / folder / name).write_bytes(content)
    (root / folder / "readme.html").write_text("not a pickle")


def write_archive(root: Path, archive: str, folder: str, members: dict[str, bytes]) -> None:
    with tarfile.open(root / archive, "w:gz") as tar:
        top = tarfile.TarInfo(folder)
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for name, content in {"readme.html": b"not a pickle", **members}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
