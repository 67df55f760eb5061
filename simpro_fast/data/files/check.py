"""A look at every file of a user's data set before anything is trained on it."""

from __future__ import annotations

import csv
import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from simpro_fast.data.files.decode import (
    MEGAPIXELS,
    OK,
    TOO_LARGE,
    Decoder,
    Facts,
    check_file,
    is_heif_name,
)
from simpro_fast.data.files.manifest import EVALUATED, SPLITS, Manifest, Row, csv_bytes
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.names import hint
from simpro_fast.utils.parallel_map import in_order
from simpro_fast.utils.regular_file import read_regular

CACHE_NAME = ".prepare_cache.csv"
_CACHE_COLUMNS = (
    *("path", "member", "offset", "size", "mtime_ns"),
    *("width", "height", "bytes", "sha256", "status_by_both_decoders"),
)
"""A cache of other columns, by other rules, is not used."""
_Key = tuple[str, str, int]
"""Identity of an image: path, member, offset."""


@dataclass(frozen=True)
class Checked:
    """A data set all of whose files were looked at."""

    manifest: Manifest
    """All rows, those that cannot be used included, with their status."""
    repeats: int
    """Images that occur again within the unlabeled set or within one labeled class: harmless."""
    decoded: int
    """Files that were decoded now; the others were known from an earlier look."""

    def problems(self) -> list[Row]:
        return [row for row in self.manifest.rows if row.status != OK]

    def counts(self) -> dict[str, Counter[str]]:
        """Usable images: split to class name to number."""
        counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        for row in self.manifest.usable().rows:
            counts[row.split][row.label] += 1
        return counts


def check_images(
    manifest: Manifest,
    cache: Path,
    *,
    threads: int,
    progress: Callable[[int, int], None],
    new_decoder: Callable[[], Decoder],
    compare: bool = True,
    megapixels: int = MEGAPIXELS,
    packing: bool = False,
) -> Checked:
    """Decode and hash every file once, in parallel, and compare contents between the splits.

    It is decoded as in evaluation and as in training, which must agree on the picture.

    Results are kept in `cache` by path, size and time of change, also those of a look that was
    interrupted: a second one decodes only what is new.

    Args:
        progress: called with (files done, files to do).
        new_decoder: makes the decoder of training, one for each thread.
        compare: whether equal contents are a problem; a published set is taken as it is.
        megapixels: the largest picture that is decoded.
        packing: HEIC is read as well.
    """
    known = _read_cache(cache)
    stamps = {path: _stamp(path) for path in {row.path for row in manifest.rows}}
    listed = {_key(row): row for row in manifest.rows}
    facts = {
        key: known[key][1]
        for key in listed
        if key in known
        and known[key][0] == stamps[key[0]] is not None
        and _within(known[key][1], megapixels)
        and not is_heif_name(str(listed[key].image))  # it depends on `packing` and on pillow-heif
    }
    missing = [key for key in listed if key not in facts]
    own = threading.local()

    def look(key: _Key) -> Facts:
        if not hasattr(own, "decoder"):
            own.decoder = new_decoder()
        return check_file(listed[key].image, own.decoder, megapixels, packing)

    looked_at = in_order(look, missing, threads)
    try:
        for done, (key, found) in enumerate(zip(missing, looked_at, strict=True), start=1):
            facts[key] = found
            progress(done, len(missing))
    finally:
        looked_at.close()
        if missing:
            _write_cache(cache, stamps, facts)
    rows = [_with_facts(row, facts[_key(row)]) for row in manifest.rows]
    repeats = 0
    if compare:
        rows, repeats = _mark_duplicates(rows)
    return Checked(replace(manifest, rows=tuple(rows)), repeats, len(missing))


def nothing_to_learn_from(checked: Checked) -> str | None:
    """One line: the first class without a usable labeled image, or an empty unlabeled set."""
    counts = checked.counts()["labeled"]
    for name in checked.manifest.class_names:
        if not counts[name]:
            near = hint(name, counts)
            return (
                f"class {name!r} has no usable labeled image{near}; add some or remove its folder"
            )
    listed = any(row.split == "unlabeled" for row in checked.manifest.rows)
    if listed and not checked.counts()["unlabeled"].total():
        return "no unlabeled image can be used; see the list above"
    return None


def _mark_duplicates(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Set the status of rows whose content must not occur where it does.

    A training image that equals a test image would leak it; an unlabeled one that equals a
    labeled one counts twice; one picture with two labels is right in neither. The test image
    stays, the labeled image stays, both of the contradicting ones go.
    """
    evaluated: dict[str, Row] = {}
    labeled: dict[str, Row] = {}
    contradicted: dict[str, Row] = {}
    for row in rows:
        if row.status != OK:
            continue
        if row.split in EVALUATED:
            evaluated.setdefault(row.sha256, row)
        elif row.split == "labeled":
            first = labeled.setdefault(row.sha256, row)
            if first.label != row.label:
                contradicted[row.sha256] = row
    marked, repeats = [], 0
    seen: set[tuple[str, str]] = set()
    for row in rows:
        reason = None
        if row.status == OK:
            reason = _duplicate(row, evaluated, labeled, contradicted)
            repeats += reason is None and (row.split, row.sha256) in seen
            seen.add((row.split, row.sha256))
        marked.append(row if reason is None else replace(row, status=f"duplicate: {reason}"))
    return marked, repeats


def _duplicate(
    row: Row, evaluated: dict[str, Row], labeled: dict[str, Row], contradicted: dict[str, Row]
) -> str | None:
    """Find what is wrong with a readable image's content; tables go from content to image."""
    test, same = evaluated.get(row.sha256), labeled.get(row.sha256)
    if row.split in EVALUATED:
        if test is not None and test.label != row.label:
            return f"{test.image} has the same content and the label {test.label!r}"
    elif test is not None:
        return f"leaks the {test.split} image {test.image}"
    elif same is not None and row.sha256 in contradicted:
        if row.split == "labeled":
            other = contradicted[row.sha256] if row.label == same.label else same
            return f"{other.image} has the same content and the label {other.label!r}"
    elif row.split == "unlabeled" and same is not None and _key(same) != _key(row):
        return f"also labeled as {same.image}"
    return None


def _within(facts: Facts, megapixels: int) -> bool:
    """Whether an earlier look, perhaps with another limit, would end alike with this one."""
    too_large = facts.width * facts.height > megapixels * 10**6
    return not too_large and not facts.status.startswith(TOO_LARGE)


def _key(row: Row) -> _Key:
    return row.path, row.member, row.offset


def _with_facts(row: Row, facts: Facts) -> Row:
    """The row with what the look gave; a member keeps its length, which is part of its place."""
    return replace(row, **{**asdict(facts), "bytes": row.bytes if row.member else facts.bytes})


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _read_cache(path: Path) -> dict[_Key, tuple[tuple[int, int], Facts]]:
    """Read what an earlier look found; anything odd means that there was none."""
    try:
        text = read_regular(path).decode("utf-8", "surrogateescape")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        if tuple(next(reader)) != _CACHE_COLUMNS:
            return {}
        return {
            (name, member, int(offset)): (
                (int(size), int(mtime)),
                Facts(int(width), int(height), int(length), sha256, status),
            )
            for name, member, offset, size, mtime, width, height, length, sha256, status in reader
        }
    except (OSError, ValueError, csv.Error, StopIteration):
        return {}


def _write_cache(
    path: Path, stamps: dict[str, tuple[int, int] | None], facts: dict[_Key, Facts]
) -> None:
    def rows() -> Iterator[Sequence[object]]:
        yield _CACHE_COLUMNS
        for key, found in facts.items():
            stamp = stamps[key[0]]
            if stamp is not None:
                yield [*key, *stamp, *asdict(found).values()]

    content = csv_bytes(rows)
    with replacing(path) as file:
        file.write(content)
