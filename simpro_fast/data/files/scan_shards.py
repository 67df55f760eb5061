"""Finding the images of WebDataset tar shards.

Members belong together as in WebDataset: the key of a sample is a member's name up to the first
dot of its last part, the rest is its field (`a/0001.seg.png`: key `a/0001`, field `seg.png`). A
labeled sample names its class in the field `cls` (a whole number or a name) or else `txt`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from simpro_fast.data.files.decode import is_image_name
from simpro_fast.data.files.manifest import Row
from simpro_fast.data.files.skipped import FURTHER, HIDDEN, LONELY, NO_IMAGE, Ignored
from simpro_fast.data.files.tar_index import FILE, FOLDER, Entry, Member, tar_entries
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.local_files import remote
from simpro_fast.utils.names import nfc

_LABELS = ("cls", "txt")
_LONGEST_LABEL = 200
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_shard_name(name: str) -> bool:
    """Whether a file is taken for a tar shard, by its ending."""
    return name.lower().endswith(".tar")


def expand(root: Path) -> list[str]:
    """The folders and shards that a user's path stands for, absolute.

    Besides a folder and a .tar file it may be a pattern, as WebDataset's users write them:
    `photos-{000..127}.tar`, `{a,b}.tar`, `photos-*.tar`. Numbers keep their leading zeros.

    Raises:
        UserError: an address on another machine, a file of another kind, one that a brace names
            and that is missing, or a pattern that nothing matches.
    """
    text = str(root)
    refuse_address(text)
    found: list[str] = []
    for path in [text] if os.path.lexists(text) else braces(text):
        if glob.has_magic(path) and not os.path.lexists(path):
            matches = sorted(glob.glob(path))
            if not matches:
                raise UserError(f"{path}: nothing matches this pattern; check the path")
            found += matches
        else:
            found.append(path)
    for path in found:
        if os.path.isfile(path) and not is_shard_name(path):
            raise UserError(f"{path}: neither a folder nor an uncompressed .tar file")
    return list(dict.fromkeys(map(os.path.abspath, found)))


def refuse_address(text: str) -> None:
    """Raise `UserError` for an address on another machine."""
    if why := remote(text):
        raise UserError(why)


def braces(text: str) -> Iterator[str]:
    """Expand the braces of a pattern: `{000..127}`, `{a,b}`.

    Raises:
        UserError: an empty range.
    """
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    span = _RANGE.fullmatch(match[1])
    if span:
        low, high = span[1], span[2]
        choices = [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)]
        if not choices:
            raise UserError(f"{text}: the range {{{match[1]}}} is empty; write the lower end first")
    else:
        choices = match[1].split(",")
    for choice in choices:
        yield from braces(text[: match.start()] + choice + text[match.end() :])


def scan_shard(path: str, split: str, ignored: Ignored) -> list[Row]:
    """One row per sample with an image, in the order of the tar; sizes in pixels are 0.

    Labels are read where `split` is not `unlabeled`. Hidden members, samples without an image and
    images beside a sample's first (a mask `0001.seg.png` beside `0001.jpg`) are left out and
    counted.

    Raises:
        UserError: what `tar_entries` raises; a sample without a label or with two images; a member
            that occurs twice; a link or a sparse file in the place of an image.
    """
    samples: dict[str, dict[str, Entry]] = {}
    for entry in tar_entries(path):
        if entry.kind == FOLDER:
            continue
        member = _member(path, entry)
        parts = entry.name.split("/")
        key, dot, field = parts[-1].partition(".")
        if any(part.startswith(".") and part not in (".", "..") for part in parts):
            ignored.add(HIDDEN, str(member))
        elif not dot:
            ignored.add(NO_IMAGE, str(member))
        elif entry.kind == FILE:
            sample = samples.setdefault("/".join([*parts[:-1], key]), {})
            if sample.setdefault(field.lower(), entry) is not entry:
                raise UserError(f"{member}: occurs twice; write the shard without the other")
        elif is_image_name(field) or field.lower() in _LABELS:
            raise UserError(
                f"{member}: a {entry.kind}; write the file itself "
                "(tar --dereference --hard-dereference, without --sparse)"
            )
    rows = []
    for fields in samples.values():
        image = _image(path, fields, ignored)
        if image is None:
            ignored.add(LONELY, str(_member(path, next(iter(fields.values())))))
            continue
        label = "" if split == "unlabeled" else _label(path, image, fields)
        rows.append(
            Row(path, label, split, bytes=image.length, member=image.name, offset=image.offset)
        )
    return rows


def _member(path: str, entry: Entry) -> Member:
    return Member(path, entry.name, entry.offset, entry.length)


def _image(path: str, fields: dict[str, Entry], ignored: Ignored) -> Entry | None:
    """The image of a sample: the one whose field is an ending alone, if there are several."""
    images = {field: entry for field, entry in fields.items() if is_image_name(field)}
    chosen = [entry for field, entry in images.items() if "." not in field] or [*images.values()]
    if len(chosen) > 1:
        raise UserError(
            f"{_member(path, chosen[1])}: a second image of its sample, beside "
            f"{_member(path, chosen[0]).name!r}; give each a name of its own"
        )
    for entry in images.values():
        if entry is not chosen[0]:
            ignored.add(FURTHER, str(_member(path, entry)))
    return chosen[0] if chosen else None


def _label(path: str, image: Entry, fields: dict[str, Entry]) -> str:
    """The class of a sample: its name, or its number in decimal."""
    entry = next((fields[name] for name in _LABELS if name in fields), None)
    if entry is None:
        raise UserError(
            f"{_member(path, image)}: has no label; add a member .cls with the class to its sample"
        )
    where = _member(path, entry)
    try:
        text = where.read_bytes().decode().strip() if entry.length <= _LONGEST_LABEL else ""
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from None
    if not text or not text.isprintable():
        raise UserError(
            f"{where}: is not the name or number of a class "
            f"(one line of at most {_LONGEST_LABEL} bytes)"
        )
    if text.isascii() and text.lstrip("-").isdigit():
        if text.startswith("-"):
            raise UserError(f"{where}: {text} is no class; put unlabeled samples into other shards")
        return str(int(text))
    return nfc(text)
