"""One self-contained HTML page: everything in it, nothing fetched, nothing that runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from simpro_fast.answers.report.figures import Figures
from simpro_fast.answers.report.figures.style import COLOURS
from simpro_fast.answers.report.findings import finding, intervals, shared_warnings
from simpro_fast.answers.report.groups import Group, labeled_columns, spread_titles
from simpro_fast.answers.report.paired import NUMBERS, Difference, compare, not_adjusted
from simpro_fast.answers.report.pictures import Mistakes, TrainingViews, data_uri
from simpro_fast.answers.report.runs import METHOD_TITLES, Run
from simpro_fast.answers.report.terminal import ACCURACIES, duration, spread_text
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.errors import UserError, pip_line

PAGE = "report.html"
_DRAWN = ("seed", "data.split_seed")
"""Keys in which repetitions differ, and experiments need not."""
_SHOWN_CLASSES = 30
"""Rows up to which a table of classes is open."""

Table = dict[str, Any]
"""`head` and `rows` of strings, the first of each row its title."""


def write_page(
    path: Path,
    groups: Sequence[Group],
    figures: Figures,
    pictures: Sequence[tuple[TrainingViews | None, Mistakes | None]],
    notes: Sequence[str],
) -> None:
    """Write the page.

    Args:
        pictures: views and mistakes of the first run of every group.
        notes: what must be said before everything else.

    Raises:
        UserError: jinja2 is missing, or the file cannot be written.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise UserError(f"the page of a report needs jinja2: {pip_line('report')}") from None
    environment = Environment(
        loader=PackageLoader("simpro_fast.answers.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html.j2")
    write_atomically(path, template.render(**content(groups, figures, pictures, notes)))


def content(
    groups: Sequence[Group],
    figures: Figures,
    pictures: Sequence[tuple[TrainingViews | None, Mistakes | None]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Collect what the template is filled with."""
    several = len(groups) > 1
    names = [str(name) for name in groups[0].summary["class_names"]]
    labeled = bool(groups[0].summary.get("labeled_counts"))
    title = groups[0].name if not several else f"{len(groups)} experiments"
    if len(groups) == 2:
        title = " and ".join(group.label for group in groups)
    differences = compare(groups)
    return {
        "title": title,
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "several": several,
        "notes": [_without_folders(note) for note in notes],
        "together": figures.together,
        "summary": _summary_table(groups),
        "spread": spread_titles(groups),
        "differences": _differences_table(differences),
        "not_adjusted": not_adjusted(differences),
        "states": [state for group in groups for state in _states(group)],
        "shared": shared_warnings([finding(group.summary) for group in groups]),
        "priors": _prior_table(groups, names),
        "accuracies": _accuracy_table(groups, names),
        "numbers": "Numbers" + ", classes with most labeled images first" * labeled,
        "many_classes": len(names) > _SHOWN_CLASSES,
        "truth_known": groups[0].summary.get("pi_u_true") is not None,
        "groups": [
            {
                "colour": number % len(COLOURS),
                "label": group.label,
                "runs": [_run(run) for run in group.runs],
                "finding": finding(group.summary),
                "first": group.runs[0].repetition,
                "repeated": len(group.runs) > 1,
                "figures": figures.each[number],
                "views": _views(pictures[number][0]),
                "mistakes": _mistakes(pictures[number][1], names),
                "config": _flat(group.runs[0].config),
            }
            for number, group in enumerate(groups)
        ],
        "differing": _differing(groups),
    }


def _summary_table(groups: Sequence[Group]) -> Table:
    """Accuracies and KL; experiments in columns."""
    lines: list[list[str]] = []
    for title, key in ACCURACIES.items():
        values = [spread_text(group.number(key), 1) for group in groups]
        if set(values) != {"-"}:
            lines.append([f"{title}, %", *values])
    if groups[0].summary.get("pi_u_true") is not None:
        kl = [spread_text(group.number("kl_pi_u"), 3) for group in groups]
        lines.append(["KL(true || pi_u), nats", *kl])
    for key, what, digits in (
        ("ece", "expected calibration error", 4),
        ("temperature", "temperature that fits best", 3),
        ("images_per_second", "views per second", 0),
    ):
        values = [spread_text(group.number(key), digits) for group in groups]
        if set(values) != {"-"}:
            lines.append([what, *values])
    lines.append(["steps", *(f"{group.summary['steps']:,}" for group in groups)])
    lines.append(["runs", *(group.repetitions for group in groups)])
    return {"head": ["", *(group.label for group in groups)], "rows": lines}


def _differences_table(found: Sequence[Difference]) -> Table | None:
    """One row for each number of each experiment but the first."""
    if not found:
        return None
    rows = [
        [
            one.label,
            f"{NUMBERS[one.key].title}, {NUMBERS[one.key].unit}",
            one.number(one.mean, "+"),
            one.number(one.error),
            str(len(one.values)),
            one.verdict,
        ]
        for one in found
    ]
    head = [f"minus {found[0].other}", "", "difference", "standard error", "splits", ""]
    return {"head": head, "rows": rows}


def _states(group: Group) -> list[tuple[str, str]]:
    """Which runs of a group are not finished, and what became of them."""
    found: dict[str, list[str]] = {}
    for run in group.runs:
        if run.state:
            found.setdefault(run.state, []).append(run.repetition)
    return [(f"{group.label}, {'; '.join(which)}", state) for state, which in found.items()]


def _prior_table(groups: Sequence[Group], names: Sequence[str]) -> Table:
    """Every class with its images, its true share, and the estimates."""
    summary = groups[0].summary
    truth, images = summary.get("pi_u_true"), summary.get("unlabeled_counts")
    head, columns = _labeled(groups)
    head += ["images"] * bool(images) + ["true, %"] * bool(truth)
    if images:
        columns.append([f"{count:,}" for count in images])
    if truth:
        columns.append([f"{100 * share:.2f}" for share in truth])
    for group in groups:
        mean, spread = group.vector("pi_u")
        head.append(f"{group.label}: pi_u, %")
        columns.append([_percent(m, s) for m, s in zip(mean, spread, strict=True)])
        bounds = intervals(group.summary)
        if bounds:
            head.append(f"{group.label}: estimate, %")
            columns.append(
                [
                    f"{100 * i.estimate:.1f} ({100 * i.low:.1f} to {100 * i.high:.1f})"
                    for i in bounds
                ]
            )
    return {"head": head, "rows": _in_order(groups[0], names, *columns)}


def _accuracy_table(groups: Sequence[Group], names: Sequence[str]) -> Table:
    head, columns = _labeled(groups)
    for group in groups:
        mean, spread = group.vector("per_class")
        columns.append([_percent(m / 100, s / 100) for m, s in zip(mean, spread, strict=True)])
    head += [f"{group.label}, %" for group in groups]
    return {"head": head, "rows": _in_order(groups[0], names, *columns)}


def _labeled(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """First heads and columns of a table of classes."""
    known = {head: counts for head, counts in labeled_columns(groups).items() if counts}
    return ["class", *known], [[f"{count:,}" for count in counts] for counts in known.values()]


def _in_order(group: Group, *columns: Sequence[str]) -> list[list[str]]:
    """Columns with a cell per class as rows, in the order of the figures."""
    return [[column[k] for column in columns] for k in group.class_order]


def _percent(mean: float, spread: float) -> str:
    known = [None if value != value else 100 * float(value) for value in (mean, spread)]
    return spread_text((known[0], known[1]), 1)


def _views(views: TrainingViews | None) -> dict[str, Any] | None:
    if views is None:
        return None
    count, num_strong = views.strong.shape[:2]
    heads = ["original", "weak", *(f"strong {v + 1}" for v in range(num_strong))]
    rows = []
    for i in range(count):
        images = [views.original[i], views.weak[i], *views.strong[i]]
        captions = ["", "", *(views.captions[i] if views.captions else [""] * num_strong)]
        cells = list(zip(map(data_uri, images), heads, captions, strict=True))
        rows.append({"title": views.titles[i], "cells": cells})
    return {"side": views.side or views.original.shape[1], "rows": rows}


def _mistakes(mistakes: Mistakes | None, names: Sequence[str]) -> list[dict[str, str]] | None:
    if mistakes is None:
        return None
    return [
        {
            "uri": data_uri(image),
            "predicted": names[predicted],
            "true": names[label],
            "probability": f"{100 * probability:.1f} %",
        }
        for image, label, predicted, probability in zip(
            mistakes.images,
            mistakes.labels,
            mistakes.predicted,
            mistakes.probability,
            strict=True,
        )
    ]


def _run(run: Run) -> dict[str, Any]:
    """Machine and versions of one run."""
    summary, environment = run.summary, run.environment
    facts = {"folder": run.path.resolve().name, "state": run.state or "finished"}
    facts["method"] = METHOD_TITLES.get(summary["method"], str(summary["method"]))
    if summary.get("seconds") is not None:
        facts["wall time"] = duration(summary["seconds"])
    facts |= _flat(environment)
    return {"which": run.repetition, "facts": facts}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _value(value)
    return found


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return "null" if value is None else _without_folders(str(value))


def _without_folders(text: str) -> str:
    """Only the last name of absolute paths: the page is mailed, and tells nothing of a machine."""
    return re.sub(r"(^|[=,:\[\s'\"])~?/(?:[^/,;:\]\"]*/)*", r"\1", text)


def _differing(groups: Sequence[Group]) -> Table | None:
    """Keys in which the configurations of the groups differ."""
    flat = [_flat(group.runs[0].config) for group in groups]
    if len(groups) < 2 or not all(flat):
        return None
    keys = dict.fromkeys(key for one in flat for key in one if key not in _DRAWN)
    rows = [[key, *(one.get(key, "-") for one in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return {"head": ["", *(group.label for group in groups)], "rows": rows}
