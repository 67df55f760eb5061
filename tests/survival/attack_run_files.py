"""Attacks by the files of a run folder: every value of each, one at a time, is something else."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simpro_fast.answers.report.figures import Figures
from simpro_fast.answers.report.groups import Group, check_same_split, group_runs, seeds_that_differ
from simpro_fast.answers.report.page import content
from simpro_fast.answers.report.pictures import pictures_of
from simpro_fast.answers.report.runs import load_run
from simpro_fast.answers.report.terminal import print_report, report_data
from simpro_fast.cli.watch import overview
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.terminal import rendered
from tests.answers.report.made_runs import make_run
from tests.survival.attack import Attempt, trial, wrong_line

TRIED = 300
"""Of all changes, drawn by a fixed seed."""
_GONE = object()
VALUES: tuple[Any, ...] = (
    *(_GONE, None, True, -1, 0, 3, 10**18, 10**400, 0.5, -0.5, 1e-320, 1e308, float("nan")),
    *("", "x", "1", "evil\n\x1b[31m\u202e$^$", "\udcff", [], [1], [[None]], {}, {"x": 1}),
)
Place = tuple[str | int, ...]


def places(tree: Any, above: Place = ()) -> Iterator[Place]:
    """Where all values of a JSON document are, the document itself first."""
    yield above
    if isinstance(tree, list | dict):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*above, key))


def changed(tree: Any, place: Place, value: Any) -> Any:
    """A copy with another value at a place."""
    if not place:
        return {} if value is _GONE else value
    copy, (key, *rest) = tree.copy(), place
    if value is _GONE and not rest:
        del copy[key]
    else:
        copy[key] = changed(tree[key], tuple(rest), value)
    return copy


def look_at(run: Path) -> list[Group]:
    """All that `watch` and `report` read and say, but for the figures."""
    said = io.StringIO()
    rendered(overview([run])[0], said, 100)
    runs = [load_run(run)]
    groups = group_runs(runs)
    notes = [*check_same_split(groups), *filter(None, map(seeds_that_differ, groups))]
    json.dumps(report_data(groups, notes), allow_nan=False)
    print_report(groups, notes, file=said)
    views, mistakes, _ = pictures_of(runs[0])
    content(groups, Figures([], {}, [{} for _ in groups]), [(views, mistakes)], notes)
    return groups


def complaint_about(run: Path, look: Callable[[Path], Any]) -> str | None:
    """Neither a traceback nor a line that cannot be shown."""
    try:
        look(run)
    except UserError as error:
        return wrong_line(str(error))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def make_runs(folder: Path) -> list[Path]:
    """A finished run, and one that is not."""
    names = ["a", "b", "c"]
    finished = make_run(folder / "a/seed1", class_names=names, shares=True, evaluated=True)
    failed = make_run(folder / "b/seed1", class_names=names, finished=False)
    return [finished, failed]


def changes(run: Path) -> Iterator[tuple[Path, Place, int, str]]:
    """File, place and number of the value, and the text that the file has with it."""
    for path in [*sorted(run.rglob("*.json*")), run / "config.yaml"]:
        lines = path.read_text().splitlines()
        last = len(lines) - 1 if path.suffix == ".jsonl" else 0
        tree = json.loads(lines[last])
        for place in places(tree):
            for number, value in enumerate(VALUES):
                new = json.dumps(changed(tree, place, value))
                yield path, place, number, "\n".join([*lines[:last], new, ""])


@trial("values of a run's files")
def no_value_ends_in_a_traceback(folder: Path) -> Iterator[Attempt]:
    everything = [change for run in make_runs(folder) for change in changes(run)]
    for path, place, number, text in random.Random(0).sample(everything, TRIED):
        run = next(p for p in path.parents if p.name == "seed1")
        before = path.read_text()
        path.write_text(text)
        what = f"{path.name} {'.'.join(map(str, place))} = {VALUES[number]!r:.30}"
        yield Attempt(what, complaint_about(run, look_at))
        path.write_text(before)
