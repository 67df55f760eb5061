"""Summary of a look at a data set: for the terminal, and as `report.json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from simpro_fast.config.data import Fit
from simpro_fast.data.files.check import Checked
from simpro_fast.data.files.decode import is_heif_name
from simpro_fast.data.files.manifest import Row
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.utils.printable import printable
from simpro_fast.utils.terminal import plain_table, rendered

_SHOWN = 50
_ASPECT_RATIOS = ("1:3", "1:2", "9:16", "2:3", "3:4", "1:1", "4:3", "3:2", "16:9", "2:1", "3:1")
_MUCH_CUT = 0.05
"""Share of the pixels outside the largest centred squares from which on they are worth a line."""
_SHOWN_CLASSES = 100


def summary_lines(checked: Checked, ignored: Ignored, file: TextIO, fit: Fit) -> Iterator[str]:
    """The summary as `file` can show it, names made printable; `fit` is `data.fit`."""
    counts = checked.counts()
    totals = {split: sum(of.values()) for split, of in counts.items()}
    names = checked.manifest.class_names
    evaluated = totals["val"] + totals["test"]
    yield (
        f"{len(names)} classes, {totals['labeled']} labeled, {totals['unlabeled']} unlabeled, "
        f"{evaluated} val images, {sum(ignored.counts.values())} ignored"
    )
    table = plain_table("  class", "labeled", "val")
    for name in names[:_SHOWN_CLASSES]:
        tested = counts["val"][name] + counts["test"][name]
        table.add_row(f"  {printable(name)}", str(counts["labeled"][name]), str(tested))
    yield rendered(table, file)
    if len(names) > _SHOWN_CLASSES:
        yield f"  ... and {len(names) - _SHOWN_CLASSES} more, all in report.json"
    for line in ignored.lines():
        yield f"ignored: {printable(line)}"
    for line in _notes(checked, ignored, evaluated, fit):
        yield f"note: {printable(line)}"
    problems = checked.problems()
    for row in problems[:_SHOWN]:
        yield printable(f"{row.image}: {row.status}")
    if len(problems) > _SHOWN:
        yield f"... and {len(problems) - _SHOWN} more"


def _notes(checked: Checked, ignored: Ignored, evaluated: int, fit: Fit) -> Iterator[str]:
    yield from ignored.notes
    if fit == "crop":
        yield from _cut(checked.manifest.usable().rows)
    if checked.repeats:
        yield f"{checked.repeats} images occur again in their own set; they stay"
    heic = sum(is_heif_name(row.member or row.path) for row in checked.manifest.usable().rows)
    if heic:
        yield f"{heic} HEIC image(s) can be trained on from the packed array alone (data.packed)"
    if not evaluated:
        yield "no val images; set data.holdout_per_class, or nothing is measured"


def _cut(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line where much of the pictures lies outside their largest centred squares."""
    seen = [min(row.width, row.height) / max(row.width, row.height) for row in rows]
    cut = 1 - sum(seen) / max(1, len(seen))
    if cut < _MUCH_CUT:
        return

    def nearest(row: Row) -> str:
        def distance(ratio: str) -> float:
            width, height = map(int, ratio.split(":"))
            return abs(math.log(row.width / row.height * height / width))

        return min(_ASPECT_RATIOS, key=distance)

    ratios = Counter(map(nearest, rows)).most_common()
    shares = ", ".join(f"{ratio} {count / len(rows):.0%}" for ratio, count in ratios)
    yield (
        f"of each picture the largest centred square is seen (width:height {shares}), so {cut:.0%} "
        "of the area is not; data.fit=pad shows all of it"
    )


def report(checked: Checked, ignored: Ignored) -> dict[str, Any]:
    """The content of `report.json`."""
    return {
        "class_names": list(checked.manifest.class_names),
        "counts": {split: dict(sorted(of.items())) for split, of in checked.counts().items()},
        "ignored": dict(ignored.counts),
        "repeats": checked.repeats,
        "problems": [_problem(row) for row in checked.problems()],
    }


def _problem(row: Row) -> dict[str, str]:
    member = {"member": row.member} if row.member else {}
    return {"path": row.path, **member, "reason": row.status}
