"""Finding the images of a user's folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from simpro_fast.data.image_files import is_image_name
from simpro_fast.data.manifest import Manifest, Row, make_manifest
from simpro_fast.errors import UserError


@dataclass
class Ignored:
    """What a scan left out, by reason, with the first name of each for the message."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, path: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, path)

    def lines(self) -> list[str]:
        return [
            f"{count} {reason} (first: {self.examples[reason]})"
            for reason, count in sorted(self.counts.items())
        ]


HIDDEN, NO_IMAGE, OUTSIDE, TAKEN = (
    "hidden",
    "not an image by its ending",
    "image beside the class folders",
    "unlabeled that is also in the labeled or val folder",
)


def scan_folders(
    labeled: Path, unlabeled: Iterable[Path], val: Path | None = None
) -> tuple[Manifest, Ignored]:
    """List the images of `labeled/<class>/**`, of the unlabeled roots and of `val/<class>/**`.

    Symbolic links are followed. Names that start with a dot, and files without the ending of an
    image, are ignored and counted. A file of the labeled or val folder that lies below an
    unlabeled root as well is left out there. Nothing is opened: sizes are 0.

    Raises:
        UserError: a folder is missing, unreadable or holds no image; fewer than two classes; a
            class of `val` that `labeled` lacks.
    """
    ignored = Ignored()
    rows, classes = scan_labeled(labeled, val, ignored)
    taken = {os.path.realpath(row.path) for row in rows}
    roots = list(unlabeled)
    heap: dict[str, Row] = {}
    for root in roots:
        for path in _images(root, ignored):
            if os.path.realpath(path) in taken:
                ignored.add(TAKEN, path)
            else:
                heap[path] = Row(path, "", "unlabeled")
    if not heap:
        raise UserError(f"{', '.join(map(str, roots)) or 'no folder'}: no unlabeled image found")
    base = common_folder(labeled, *roots, *([val] if val else []))
    return make_manifest(base, [*rows, *heap.values()], classes), ignored


def common_folder(*folders: Path) -> Path:
    """The deepest folder that holds all of them; what fingerprints are relative to."""
    return Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))


def scan_labeled(labeled: Path, val: Path | None, ignored: Ignored) -> tuple[list[Row], list[str]]:
    """The images of the class folders, and the classes, those without an image included."""
    classes = _classes(labeled, ignored)
    if len(classes) < 2:
        found = f"only the class {next(iter(classes))}" if classes else "no class folder"
        raise UserError(
            f"{labeled}: {found}; at least two folders labeled/<class>/ with images are needed"
        )
    rows = [Row(path, name, "labeled") for name, paths in classes.items() for path in paths]
    if not rows:
        raise UserError(f"{labeled}: no image in its {len(classes)} class folders")
    if val is not None:
        val_classes = _classes(val, ignored)
        unknown = sorted(set(val_classes) - set(classes))
        if unknown:
            raise UserError(
                f"{val}: class {unknown[0]!r} is not among the labeled ones "
                f"({_some(classes)}); use the same folder names"
            )
        val_rows = [Row(path, name, "val") for name, paths in val_classes.items() for path in paths]
        if not val_rows:
            raise UserError(f"{val}: no image in class folders; leave it out or fill it")
        rows += val_rows
    return rows, list(classes)


def _some(names: Iterable[str], shown: int = 10) -> str:
    listed = list(names)
    return ", ".join([*listed[:shown], *(["..."] if len(listed) > shown else [])])


def _classes(root: Path, ignored: Ignored) -> dict[str, list[str]]:
    """Class name to image paths; classes are the folders directly in `root`, sorted by name."""
    classes: dict[str, list[str]] = {}
    for entry in _entries(root, ignored):
        if _is_folder(entry):
            classes[entry.name] = list(_images(Path(entry.path), ignored))
        else:
            ignored.add(OUTSIDE if is_image_name(entry.name) else NO_IMAGE, entry.path)
    return classes


def _images(root: Path, ignored: Ignored, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Absolute paths of the images below `root`; a link that leads back up is not followed."""
    real = os.path.realpath(root)
    if real in above:
        return
    for entry in _entries(root, ignored):
        if _is_folder(entry):
            yield from _images(Path(entry.path), ignored, (*above, real))
        elif is_image_name(entry.name):
            yield entry.path
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
