"""Experiments as one table in Markdown, LaTeX or CSV, beside the published numbers.

`configs/published.csv` holds those with their source. A row with a `config` is what that shipped
configuration with these `overrides` would repeat, as nearly as can be said with them; why others
have none stands in configs/README.md. Of several rows with one configuration the first counts.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from simpro_fast.answers.report.groups import Group, spread_titles
from simpro_fast.answers.report.runs import METHOD_TITLES, kl_of_uniform
from simpro_fast.answers.report.terminal import spread_text
from simpro_fast.config import flatten, load_config
from simpro_fast.config.explain import flat_items
from simpro_fast.config.find import shipped_configs
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.printable import printable

PUBLISHED = "published.csv"
FORMATS = ("markdown", "latex", "csv")
NUMBERS = {
    "top1": ("top-1 %", 1),
    "top1_class_mean": ("top-1 %, mean of the classes", 1),
    "kl_pi_u": ("KL(true, pi_u), nats", 3),
}
"""Keys of summary.json, their titles and decimal places."""


def experiments(groups: Sequence[Group], form: str) -> str:
    """One row for each experiment: mean and what it spreads (`Group`), what is published.

    Args:
        form: of `FORMATS`. In Markdown and LaTeX a spread stands in the cell of its mean, what it
            is in the header, and the sources below; CSV has a column for each number.
    """
    published = [published_for(group.runs[0].config) for group in groups]
    if form == "csv":
        return _csv(groups, published)
    runs = f"runs (± {spread})" if (spread := spread_titles(groups)) else "runs"
    header = ["experiment", "method", runs, *(title for title, _ in NUMBERS.values())]
    header += ["KL of a uniform guess", "published top-1 %"]
    rows = []
    for group, number in zip(groups, published, strict=True):
        beside = (number.mean, number.std) if number else (None, None)
        rows.append(
            [
                *_names(group),
                *(spread_text(group.number(key), digits) for key, (_, digits) in NUMBERS.items()),
                spread_text((_uniform(group), None), 3),
                spread_text(beside, 2),
            ]
        )
    sources = dict.fromkeys(number.source for number in published if number)
    notes = ["Of the last EMA weights on the test set."]
    if sources:
        notes.append(
            f"Published by {'; '.join(sources)}. The paper does not say whether its numbers are of "
            "the last evaluation or the mean of the last 20."
        )
    if form == "latex":
        return "\n".join([*(f"% {note}" for note in notes), latex(header, rows)])
    return "\n".join([markdown(header, rows), *(f"{note}\n" for note in notes)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the header."""
    lines = (
        f"| {' | '.join(printable(cell).replace('|', chr(92) + '|') for cell in cells)} |"
        for cells in (header, *rows)
    )
    first, *rest = lines
    return "\n".join([first, "|---" * len(header) + "|", *rest, ""])


def latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a `tabular`, for the package booktabs."""
    first, *rest = (" & ".join(map(_escape, cells)) + r" \\" for cells in (header, *rows))
    lines = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}"]
    lines += [r"\toprule", first, r"\midrule", *rest, r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _csv(groups: Sequence[Group], published: Sequence[Published | None]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = ("std", "standard_error")
    numbers = [name for key in NUMBERS for name in (key, *(f"{key}_{kind}" for kind in spreads))]
    beside = ("kl_uniform", "published", "published_std", "source")
    writer.writerow(["experiment", "method", "runs", *numbers, *beside])
    for group, number in zip(groups, published, strict=True):
        values = []
        for mean, spread in map(group.number, NUMBERS):
            values += [mean, *(spread if kind == group.spread_key else None for kind in spreads)]
        known = (number.mean, number.std, number.source) if number else (None, None, None)
        writer.writerow([*_names(group), *values, _uniform(group), *known])
    return text.getvalue()


def _names(group: Group) -> list[str]:
    method = str(group.summary["method"])
    return [group.name, METHOD_TITLES.get(method, method), group.repetitions]


def _uniform(group: Group) -> float | None:
    truth = group.summary.get("pi_u_true")
    return kl_of_uniform(truth) if truth else None


def _escape(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    words["±"] = r"$\pm$"
    return re.sub(
        r"[\\~^&%$#_{}±]", lambda found: words.get(found[0], f"\\{found[0]}"), printable(text)
    )


@dataclass(frozen=True)
class Published:
    """A published number; accuracies in percent."""

    metric: str
    mean: float
    std: float | None
    method: str
    source: str


def read_published() -> list[dict[str, str]]:
    """All rows of the file."""
    with (shipped_configs() / PUBLISHED).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published_for(config: dict[str, Any]) -> Published | None:
    """The number published for a run that trains as `config` says, whatever its seed; else None.

    Paths, names and what merely rounds differently do not matter.

    Args:
        config: contents of a run's config.yaml. Nothing that it names is imported.
    """
    said = dict(flat_items(config, ""))
    if said.get("model.weights") is not None:
        return None
    for training, number in _by_training():
        if all(key in said and said[key] == value for key, value in training.items()):
            return number
    return None


def published_commands(name: str) -> list[str]:
    """One line for each cell of a published table: what trains it, and the number as a comment.

    A cell without a configuration is a comment alone.

    Raises:
        ConfigError: there is no such table.
    """
    rows = read_published()
    if name not in (known := dict.fromkeys(row["set"] for row in rows)):
        raise ConfigError(f"no published table {name!r}; there are {', '.join(known)}")
    lines: dict[str, str] = {}
    for row in rows:
        if row["set"] == name:
            spread = f" ({row['std']})" if row["std"] else ""
            cell = f"# {row['mean']}{spread} % by {row['method']}, {row['distribution']}"
            cell += f", {row['setting']}"
            if row["config"]:
                lines.setdefault(command := _command(row), f"{command}  {cell}")
            else:
                lines[cell] = f"{cell}: no configuration, see configs/README.md"
    return [*lines.values()]


def _command(row: dict[str, str]) -> str:
    """The training of a row, under a name of its own where it is not the plain configuration."""
    words = [row["config"], *row["overrides"].split()]
    if row["overrides"]:
        special = re.findall(r"(?:mu|alpha) \d+", row["setting"])
        method = row["method"].replace("*", " star").replace("+", " plus")
        label = "_".join([*method.lower().split(), *(each.replace(" ", "") for each in special)])
        words.append(f"name={row['config']}_{label}")
    return f"simpro-fast train {' '.join(words)}"


@cache
def _by_training() -> list[tuple[dict[str, Any], Published]]:
    """Map each published number's training: keys that change a training, but the seed."""
    found: list[tuple[dict[str, Any], Published]] = []
    for row in read_published():
        if row["config"]:
            config = load_config(row["config"], row["overrides"].split())
            std = float(row["std"]) if row["std"] else None
            number = Published(row["metric"], float(row["mean"]), std, row["method"], row["source"])
            changes = type(config).changes()
            training = {
                key: value
                for key, value in flatten(config).items()
                if changes[key] in ("training", "length") and key != "seed"
            }
            found.append((training, number))
    return found
