"""Finding the images of a user's folders and tar shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from simpro_fast.data.files.decode import is_image_name
from simpro_fast.data.files.manifest import Manifest, Row, make_manifest
from simpro_fast.data.files.scan_shards import expand, is_shard_name, scan_shard
from simpro_fast.data.files.skipped import (
    HIDDEN,
    NO_IMAGE,
    OUTSIDE,
    SHARD_OUTSIDE,
    SPECIAL,
    TAKEN,
    Ignored,
)
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.names import class_name, hint

_PARTS = {
    **dict.fromkeys(("labeled", "labelled", "train", "training"), True),
    **dict.fromkeys(("unlabeled", "unlabelled", "val", "valid", "validation", "test"), False),
}
"""Usual names of the parts of a data set, and whether the part has labels to train on."""


def scan_folders(
    labeled: Path, unlabeled: Iterable[Path], val: Path | None = None
) -> tuple[Manifest, Ignored]:
    """List the images of `labeled/<class>/**`, of the unlabeled roots and of `val/<class>/**`.

    Classes are named in NFC, in whatever form a folder's name is. Each of the three may be
    WebDataset tar shards instead: a .tar file, a pattern (`expand`), or a folder of .tar files; an
    unlabeled root may hold both. Symbolic links are followed. Names that start with a dot, and
    files without the ending of an image, are ignored and counted. A file of the labeled or val
    folder that lies below an unlabeled root as well is left out there. Of files nothing is opened,
    of shards only the headers and labels: sizes in pixels are 0.

    Raises:
        ConfigError: `labeled` is one level too high, or `val` has a class that `labeled` lacks.
        UserError: a folder is missing, unreadable or holds no image; fewer than two classes; what
            `expand` and `scan_shard` raise.
    """
    ignored = Ignored()
    rows, classes = scan_labeled(labeled, val, ignored)
    taken = {os.path.realpath(path) for path in {row.path for row in rows}}
    roots = list(unlabeled)
    found: dict[str, list[Row]] = {}
    for place in dict.fromkeys(place for root in roots for place in expand(root)):
        for path in [place] if os.path.isfile(place) else image_files(Path(place), ignored):
            if os.path.realpath(path) in taken:
                ignored.add(TAKEN, path)
            elif path in found:
                continue
            elif is_shard_name(path):
                found[path] = scan_shard(path, "unlabeled", ignored)
            else:
                found[path] = [Row(path, "", "unlabeled")]
    unlabeled_rows = [row for listed in found.values() for row in listed]
    if not unlabeled_rows:
        where = ", ".join(map(str, roots)) or "no folder"
        raise UserError(f"{where}: no unlabeled image found{_left_out(ignored)}")
    base = common_folder(labeled, *roots, *([val] if val else []))
    return make_manifest(base, [*rows, *unlabeled_rows], classes), ignored


def common_folder(*roots: Path) -> Path:
    """The deepest folder that holds all of them; what fingerprints are relative to."""
    places = [place for root in roots for place in expand(root)]
    return Path(
        os.path.commonpath([os.path.dirname(p) if os.path.isfile(p) else p for p in places])
    )


def scan_labeled(labeled: Path, val: Path | None, ignored: Ignored) -> tuple[list[Row], list[str]]:
    """The images with a class, and the classes, those without an image included."""
    rows, classes = scan_classes(labeled, "labeled", ignored)
    _check_level(labeled, classes)
    if len(classes) < 2:
        found = f"only the class {classes[0]}" if classes else "no class folder and no tar shard"
        raise UserError(
            f"{labeled}: {found}{_left_out(ignored)}; "
            "at least two folders labeled/<class>/ with images, or shards of two classes are needed"
        )
    if not rows:
        raise UserError(f"{labeled}: no image in its {len(classes)} class folders")
    if val is not None:
        val_rows, val_classes = scan_classes(val, "val", ignored)
        unknown = sorted(set(val_classes) - set(classes))
        if unknown:
            _check_level(val, val_classes)
            one = len(unknown) == 1
            raise ConfigError(
                f"{val}: {'class' if one else 'classes'} {_some(map(repr, unknown))} "
                f"{'is' if one else 'are'} not among the labeled ones ({_some(classes)}); use the "
                f"same names{hint(unknown[0], classes)}"
            )
        if not val_rows:
            raise UserError(f"{val}: no image in class folders; leave it out or fill it")
        rows += val_rows
    return rows, classes


def _check_level(root: Path, classes: Sequence[str]) -> None:
    """Notice a folder one level above the one whose folders are the classes.

    Raises:
        ConfigError: names the folder that was probably meant.
    """
    if not os.path.isdir(root):  # shards, whose samples name their classes
        return
    parts = [name for name in classes if name.casefold() in _PARTS]
    if len(parts) > 1:
        meant = next((name for name in parts if _PARTS[name.casefold()]), parts[0])
        raise ConfigError(
            f"{root}: its folders {_some(parts)} are parts of a data set and no classes; give the "
            f"folder whose folders are the classes: did you mean {root / meant}?"
        )


def _left_out(ignored: Ignored) -> str:
    """For the message that nothing was found: often the reason is among these."""
    lines = ignored.lines()
    return f" (ignored: {'; '.join(lines)})" if lines else ""


def _some(names: Iterable[str], shown: int = 10) -> str:
    listed = list(names)
    return ", ".join([*listed[:shown], *(["..."] if len(listed) > shown else [])])


def scan_classes(root: Path, split: str, ignored: Ignored) -> tuple[list[Row], list[str]]:
    """The images of class folders or of labeled shards, and the names of the classes.

    Classes are the folders directly in `root`; only where there is none, its .tar files are read.
    """
    rows: list[Row] = []
    classes: set[str] = set()
    for place in expand(root):
        folders: dict[str, str] = {}
        shards = [place] if os.path.isfile(place) else []
        for entry in [] if shards else _entries(Path(place), ignored):
            if _is_folder(entry):
                name = class_name(entry.name, entry.path)
                if name in folders:
                    ignored.notes.append(
                        f"{folders[name]} and {entry.path} are one class: their names differ in "
                        "Unicode normalisation (NFC and NFD) alone"
                    )
                folders.setdefault(name, entry.path)
                for path in image_files(Path(entry.path), ignored):
                    if is_shard_name(path):
                        ignored.add(SHARD_OUTSIDE, path)
                    else:
                        rows.append(Row(path, name, split))
            elif is_shard_name(entry.name):
                shards.append(entry.path)
            else:
                ignored.add(OUTSIDE if is_image_name(entry.name) else NO_IMAGE, entry.path)
        for shard in shards:
            if folders:
                ignored.add(SHARD_OUTSIDE, shard)
            else:
                rows += scan_shard(shard, split, ignored)
        classes |= folders.keys()
    return rows, sorted(classes | {row.label for row in rows})


def image_files(root: Path, ignored: Ignored, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Absolute paths of images and shards below `root`, each folder's in order of their names.

    No link is followed back up. What is left out is counted in `ignored`; one folder's names at a
    time are in memory.

    Raises:
        UserError: a folder that cannot be read.
    """
    real = os.path.realpath(root)
    if real in above:
        return
    for entry in _entries(root, ignored):
        if _is_folder(entry):
            yield from image_files(Path(entry.path), ignored, (*above, real))
        elif is_image_name(entry.name) or is_shard_name(entry.name):
            # Opening a pipe would wait for ever. A broken link goes on, to be reported.
            if entry.is_file() or not os.path.exists(entry.path):
                yield entry.path
            else:
                ignored.add(SPECIAL, entry.path)
        else:
            ignored.add(NO_IMAGE, entry.path)


def _entries(root: Path, ignored: Ignored) -> list[os.DirEntry[str]]:
    """Visible entries of a folder with absolute paths, sorted by name."""
    try:
        with os.scandir(os.path.abspath(root)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(
            f"{root}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    visible = []
    for entry in entries:
        if entry.name.startswith("."):
            ignored.add(HIDDEN, entry.path)
        else:
            visible.append(entry)
    return visible


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a circle of links
        raise UserError(f"{entry.path}: cannot be read ({error.strerror}); remove it") from None
