"""Attacks by a user's data: pictures, manifests, archives, names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpro_fast.data.files.manifest import read_manifest
from tests.survival.attack import Attempt, refused, trial


@trial("manifests")
def numbers_of_a_manifest(folder: Path) -> Iterator[Attempt]:
    path = folder / "manifest.csv"
    for width in ("-1", "10" * 11, "1e3", "nan", "9" * 5000):
        path.write_text(f"path,width,height\na.jpg,{width},20\n")
        yield Attempt(
            f"width {width[:30]}", refused(lambda: read_manifest(path), "line 2", "width")
        )
