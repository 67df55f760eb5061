"""The 1000 classes of ImageNet-1k in the order of the downsampled files, and their 127 parents.

Two tables are shipped in `imagenet_lists/`. `imagenet_clsloc_wnids.json` is the order in which the
downsampled files number the classes (that of the development kit's `map_clsloc.txt`, not the
alphabetical one); it was confirmed independently at a few ids only, so `data.class_list` can
replace it. `imagenet127_wnid_map.json` maps every class to its parent among 127; it was recovered
from two published label lists without a conflict.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from simpro_fast.data.datasets.base import labeled_share
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.regular_file import read_text

NUM_CLASSES = 1000
_TABLES = resources.files("simpro_fast.data.datasets") / "imagenet_lists"
_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class ClassList:
    """Row i belongs to label i + 1 of the files."""

    wnids: tuple[str, ...]
    """WordNet ids, `n` and eight digits."""
    names: tuple[str, ...]


def class_list(path: Path | None = None) -> ClassList:
    """The shipped order of the 1000 classes, or the one in a file.

    Args:
        path: a JSON list of [wnid, name] rows, or the text of `map_clsloc.txt`: a line
            `wnid number name` for each class, numbered from 1.

    Raises:
        UserError: unreadable, or not 1000 different classes.
    """
    if path is None:
        rows = json.loads((_TABLES / "imagenet_clsloc_wnids.json").read_text(encoding="utf-8"))
    else:
        rows = _rows(path)
    wnids = tuple(str(wnid) for wnid, _ in rows)
    if len(wnids) != NUM_CLASSES or len(set(wnids)) != NUM_CLASSES:
        raise UserError(
            f"data.class_list={path}: {len(wnids)} rows with {len(set(wnids))} different classes, "
            f"expected {NUM_CLASSES}"
        )
    return ClassList(wnids, tuple(str(name) for _, name in rows))


def _rows(path: Path) -> list[tuple[str, str]]:
    where = f"data.class_list={path}"
    try:
        text = read_text(path)
        if text.lstrip().startswith("["):
            rows = [(str(row[0]), str(row[1])) for row in json.loads(text)]
        else:
            fields = [line.split() for line in text.splitlines() if line.strip()]
            numbered = sorted((int(number), wnid, name) for wnid, number, name in fields)
            if [number for number, _, _ in numbered] != list(range(1, len(numbered) + 1)):
                raise UserError(f"{where}: its numbers are not 1, 2, 3, ...")
            rows = [(wnid, name) for _, wnid, name in numbered]
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, TypeError, LookupError):
        raise UserError(
            f"{where}: neither a JSON list of [wnid, name] rows nor lines `wnid number name`"
        ) from None
    for wnid, _ in rows:
        if not _WNID.fullmatch(wnid):
            raise UserError(f"{where}: {wnid!r} is no WordNet id (n and eight digits)")
    return rows


def superclasses(listed: ClassList) -> tuple[np.ndarray, tuple[str, ...]]:
    """The 127 parents, in the order of their WordNet ids.

    Returns:
        int64 [1000], the parent of each row of `listed`, and the parents' names: the id and the
        first child, as in `n01861778 (tusker +217)`. Names of their own are not published.

    Raises:
        UserError: `listed` has a class that the table does not know.
    """
    table: dict[str, str] = json.loads(
        (_TABLES / "imagenet127_wnid_map.json").read_text(encoding="utf-8")
    )
    unknown = [wnid for wnid in listed.wnids if wnid not in table]
    if unknown:
        raise UserError(f"data.class_list: {unknown[0]} is not one of the 1000 ImageNet classes")
    parents = sorted(set(table.values()))
    children: dict[str, list[str]] = {parent: [] for parent in parents}
    named = dict(zip(listed.wnids, listed.names, strict=True))
    for wnid, parent in sorted(table.items()):
        children[parent].append(named[wnid])
    names = tuple(
        f"{parent} ({first}{f' +{len(rest)}' if rest else ''})"
        for parent, (first, *rest) in children.items()
    )
    ids = {parent: k for k, parent in enumerate(parents)}
    return np.array([ids[table[wnid]] for wnid in listed.wnids], np.int64), names


def merged(
    labels: np.ndarray, test_labels: np.ndarray, listed: ClassList, fraction: float | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Labels of the 127 parents, head first: by descending labeled count, equal ones by WordNet id.

    Args:
        labels, test_labels: int64 [N] and [T], rows of `listed`.
        fraction: labeled share of each class (`data.labeled_fraction`); None: by all images.
    """
    parents, names = superclasses(listed)
    labels, test_labels = parents[labels], parents[test_labels]
    sizes = np.bincount(labels, minlength=len(names))
    if fraction is not None:
        sizes = np.array([labeled_share(int(n), fraction) for n in sizes])
    return head_first(labels, test_labels, names, sizes)


def head_first(
    labels: np.ndarray, test_labels: np.ndarray, names: tuple[str, ...], sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Renumber the classes by descending size; equal ones keep their order.

    Labels, test labels and names change together, and everything that counts labels (splits,
    priors) comes after, so that no prior can belong to another class.

    Args:
        labels, test_labels: int64 [N] and [T].
        names: of the K classes.
        sizes: int64 [K], what to sort by.
    """
    order = np.argsort(-sizes, kind="stable")
    new_ids = np.empty_like(order)
    new_ids[order] = np.arange(len(order))
    new_labels, new_test = new_ids[labels], new_ids[test_labels]
    assert (order[new_labels] == labels).all() and (order[new_test] == test_labels).all()
    return new_labels, new_test, tuple(names[k] for k in order)
