"""`simpro-fast table` and `launch/table.py`: configurations x grid x seeds as one table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpro_fast.cli.ending import verb
from simpro_fast.cli.members import print_commands, train_members
from simpro_fast.cli.parser import CommandParser
from simpro_fast.cli.sweep import Member, add_sweep_flags, launcher_of, members_of, value_text
from simpro_fast.errors import ConfigError
from simpro_fast.printable import show
from simpro_fast.report.published import published_for
from simpro_fast.report.runs import METHOD_TITLES, kl_of_uniform
from simpro_fast.report.tables import METRICS, Block, Cell, latex, markdown
from simpro_fast.run.resume import finished_summary
from simpro_fast.utils.atomic_write import check_output, write_atomically

_EPILOG = """examples:
  simpro-fast table digits_lt/reversed digits_lt/uniform --grid method.name=simpro,fixmatch \\
      --seeds 1,2,3 --output tables/digits
  simpro-fast table cifar10_lt/reversed --seeds 1,2,3 data.root=/data/cifar --print-commands
An interrupted table goes on with the same command; what is finished is not trained again."""


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing and write the table; returns the exit code of the sweep."""
    parser = CommandParser(
        "simpro-fast table",
        "Train every configuration with every --grid value and seed, one after another, and write\n"
        "mean and standard deviation over the seeds in Markdown and LaTeX, beside the published\n"
        "number where a configuration is that of a published experiment.",
        _EPILOG,
    )
    add_sweep_flags(parser)
    parser.add_argument(
        "--metrics",
        default="top1,kl_pi_u",
        metavar="A,B",
        help=f"of {', '.join(METRICS)} (default: top1,kl_pi_u)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("table"), help="FILE without ending (default: table)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="CONFIG|key.sub=value", help="changes are for all of them"
    )
    options = parser.parse(arguments)
    sources = [word for word in options.overrides if "=" not in word]
    overrides = [word for word in options.overrides if "=" in word]
    if not sources:
        raise ConfigError("no configuration; for example simpro-fast table digits_lt/reversed")
    metrics = options.metrics.split(",")
    if unknown := [key for key in metrics if key not in METRICS]:
        raise ConfigError(f"--metrics {unknown[0]} is not one of {', '.join(METRICS)}")
    members = members_of(sources, options.grid, options.seeds, overrides)
    launcher = launcher_of(options)
    if options.print_commands:
        return print_commands(members, launcher)
    files = [options.output.with_name(options.output.name + ending) for ending in (".md", ".tex")]
    for path in files:
        check_output(path)
    code = train_members(members, launcher)
    blocks = [block_of(members, key) for key in metrics]
    notes = notes_of(members, blocks)
    text = markdown(blocks, notes)
    for path, content in zip(files, (text, latex(blocks, notes)), strict=True):
        write_atomically(path, content)
        show(f"table {path}")
    print(text, end="")
    return code


def block_of(members: Sequence[Member], key: str) -> Block:
    """The table of one metric: a row for each grid combination, a column for each configuration."""
    metric = METRICS[key]
    names = list(dict.fromkeys(member.base for member in members))
    seeds = len({member.config.seed for member in members})
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    columns = [os.path.relpath(name, common) if common else name for name in names]
    rows: dict[str, list[Cell]] = {}
    uniform = [Cell() for _ in names]
    for member in members:
        cells = rows.setdefault(row_title(member), [Cell(seeds=seeds) for _ in names])
        cell = cells[names.index(member.base)]
        cell.published = published_for(member.config)
        summary = finished_summary(member.config)
        if summary is not None and summary.get(key) is not None:
            cell.values.append(float(summary[key]))
            if key == "kl_pi_u":
                level = kl_of_uniform(summary["pi_u_true"])
                uniform[names.index(member.base)].values[:] = [level]
    if any(cell.values for cell in uniform):
        rows["uniform guess"] = uniform
    return Block(metric, columns, rows)


def row_title(member: Member) -> str:
    """The method, and what else the grid sets: `FixMatch, threshold 0.7`."""
    method = member.config.method.name
    parts = [METHOD_TITLES.get(method, method)]
    parts += [
        f"{key.rpartition('.')[2]} {value_text(value)}"
        for key, value in member.settings
        if key != "method.name"
    ]
    return ", ".join(parts)


def notes_of(members: Sequence[Member], blocks: Sequence[Block]) -> list[str]:
    """What a reader must know: configurations, seeds, sources."""
    names = ", ".join(dict.fromkeys(member.base for member in members))
    seeds = ", ".join(dict.fromkeys(str(member.config.seed) for member in members))
    steps = ", ".join(dict.fromkeys(str(member.config.train.steps) for member in members))
    notes = [
        f"{names}; seeds {seeds}; {steps} steps. Of the last EMA weights on the test set; mean ± "
        "standard deviation (n - 1) over seeds."
    ]
    shown: list[Any] = [
        cell.published
        for block in blocks
        if block.metric.published
        for cells in block.rows.values()
        for cell in cells
        if cell.published is not None
    ]
    if shown:
        sources = "; ".join(dict.fromkeys(number.source for number in shown))
        notes.append(
            f"In brackets: published by {sources}. The paper does not say whether its numbers are "
            "of the last evaluation or the mean of the last 20."
        )
    return notes
