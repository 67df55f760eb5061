"""`simpro-fast watch`: how a run stands, from its files alone."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from simpro_fast.answers.evaluation import kl_divergence
from simpro_fast.answers.report.runs import METHOD_TITLES
from simpro_fast.answers.report.terminal import bar, glyphs
from simpro_fast.cli.ending import DONE, about, verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.distributed.signals import INTERRUPTED
from simpro_fast.run.live import FINISHED, RUNNING, STARTING, LiveRun, read_live
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.printable import printable
from simpro_fast.utils.progress import clock
from simpro_fast.utils.terminal import plain_table, rendered

EXAMPLE = "runs/digits_lt/reversed/seed1"
_COLOURS = {RUNNING: "green", STARTING: "cyan", FINISHED: "bold green"}
_MOST_CLASSES, _FEWEST_CLASSES = 20, 5
_OTHER_LINES = 12
"""Of a frame, beside those of the classes."""
_MOST_RANKS = 8


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Show a run until it ends; returns the exit code."""
    parser = CommandParser(
        "simpro-fast watch",
        "Show how a run stands: progress, speed, estimated class distribution, accuracy, ranks.\n"
        "It reads the files of the run, so it may run on any machine that sees them, and ends\n"
        "with the run. Ctrl-C leaves; the run is not touched.",
        f"examples:\n  simpro-fast watch {EXAMPLE}\n  simpro-fast watch {EXAMPLE} --once",
    )
    parser.add_argument("run", type=Path, nargs="?", help=f"run directory, such as {EXAMPLE}")
    parser.add_argument(
        "--once", action="store_true", help="print it once; the default where there is no terminal"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between looks (1)"
    )
    options = parser.parse(arguments)
    if options.run is None:
        raise ConfigError(f"no run directory; for example simpro-fast watch {EXAMPLE}")
    with about(options.run):
        run = read_live(options.run)
        if options.once or not sys.stdout.isatty():
            _print(run)
            return DONE
        try:
            _follow(run, options.interval)
        except KeyboardInterrupt:
            return INTERRUPTED
    return DONE


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.1 <= (seconds := float(text)) <= 3600:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 3600")


def _print(run: LiveRun) -> None:
    columns, lines = shutil.get_terminal_size((100, 40))
    print(rendered(frame(run, sys.stdout, columns, lines), sys.stdout, columns))


def _follow(run: LiveRun, interval: float) -> None:
    """On the terminal's second screen; the last frame stays on the first."""
    console = Console(markup=False, emoji=False, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(run, sys.stdout, *console.size), refresh=True)
            if run.has_ended:
                break
            time.sleep(interval)
            run = read_live(run.path)
    _print(run)


def frame(run: LiveRun, out: TextIO, columns: int, lines: int) -> RenderableType:
    """One picture of a run, for the encoding of `out` and the size of a terminal."""
    config, steps = run.config, run.config.train.steps
    block, mark = glyphs(out)
    method = METHOD_TITLES.get(config.method.name, config.method.name)
    heading = Text.assemble((config.name, "bold"), f" seed {config.seed}, {method}: ")
    heading.append(run.state, _COLOURS.get(run.state, "bold red"))
    if run.message:  # of a run that was asked to stop it begins with the same word
        message = run.message.removeprefix(run.state).lstrip()
        heading.append(f"{' ' if message.startswith('(') else ': '}{message}")
    share, left = min(1.0, run.step / steps), run.seconds_left()
    said = f" step {run.step:,} of {steps:,} ({100 * share:.0f} %)"
    said += f"  ETA {clock(left)}" if left is not None else ""
    width = max(8, min(50, columns - len(said) - 2))
    done = f"{block * round(share * width):.<{width}}"
    classes = max(_FEWEST_CLASSES, min(_MOST_CLASSES, lines - _OTHER_LINES))
    return Group(
        heading,
        Text(done + said, no_wrap=True),
        *_numbers(run),
        *_distribution(run, columns, classes, block, mark),
        *_ranks(run),
    )


def _numbers(run: LiveRun) -> list[Text]:
    """Speed, losses and accuracy of the last period."""
    if not run.rows:
        why = "metrics.jsonl is missing" if run.state == FINISHED else "no period is complete yet"
        return [Text(f"{why}, so there are no numbers")]
    last = run.rows[-1]

    def number(key: str, form: str, scale: float = 1.0) -> str:
        value = last.get(key)
        return "-" if value is None else format(scale * value, form)

    lines = [
        f"at step {last['step']:,}",
        f"  {number('images_per_second', ',.0f')} images/s  data wait "
        f"{number('data_wait_fraction', '.0f', 100)} %  memory "
        f"{number('peak_memory_mib', ',.0f')} MiB  learning rate {number('lr', '.3g')}",
        f"  loss {number('loss', '.3f')} (labeled {number('loss_labeled', '.3f')}, unlabeled "
        f"{number('loss_unlabeled', '.3f')})  mask rate {number('mask_rate', '.2f')}  kept "
        f"pseudo-labels right {number('pseudo_label_accuracy', '.1f')} %",
    ]
    tests = [(row["top1"], row["step"]) for row in run.rows if row.get("top1") is not None]
    if tests:
        (now, at), (best, best_at) = tests[-1], max(tests)
        lines.append(f"  top-1 {now:.1f} % at step {at:,}, best {best:.1f} % at step {best_at:,}")
    return [Text(line) for line in lines]


def _distribution(
    run: LiveRun, columns: int, most: int, block: str, mark: str
) -> list[RenderableType]:
    """The estimated class distribution of the unlabeled images, with the truth where it is known.

    More than `most` classes are summed in groups of neighbours.
    """
    estimate, names = run.last("pi_u"), run.class_names
    if estimate is None or len(names) != len(estimate):
        return []
    counts = run.unlabeled_counts
    truth = [count / sum(counts) for count in counts] if counts else None
    rows = min(most, len(names))
    borders = [len(names) * row // rows for row in range(rows + 1)]
    groups = [range(start, stop) for start, stop in pairwise(borders)]
    shares = [sum(estimate[k] for k in group) for group in groups]
    truths = [sum(truth[k] for k in group) for group in groups] if truth else [None] * rows
    top = max([*shares, *(share for share in truths if share is not None)]) or 1.0
    width = max(8, min(40, columns - 48))
    table: Table = plain_table("unlabeled set, pi_u", "true")
    table.add_column(Text("estimate", style="bold"), no_wrap=True)
    for group, share, true in zip(groups, shares, truths, strict=True):
        first, last = names[group[0]], names[group[-1]]
        title = first if len(group) == 1 else f"{first} .. {last}"
        title = title if len(title) <= 24 else f"{title[:22]}.."
        shown = "-" if true is None else f"{100 * true:.1f} %"
        drawn = bar(share, true, top, width, block, mark)
        table.add_row(f"  {title}", shown, f"{100 * share:>7.1f} % {drawn}")
    if truth is None or counts is None:
        return ["", table]
    uniform = kl_divergence(counts, [1 / len(names)] * len(names))
    kl = run.last("kl_pi_u")
    said = f"  {mark} truth; KL(true || pi_u) {'-' if kl is None else f'{kl:.3f}'} nats"
    return ["", table, Text(f"{said} (a uniform guess: {uniform:.3f})")]


def _ranks(run: LiveRun) -> list[Text]:
    """Which ranks live; of many those that do not, or the first ones."""
    alive = sum(one.alive for one in run.ranks)
    lines = [Text(f"ranks: {alive} of {len(run.ranks)} live")] if run.ranks else []
    for one in sorted(run.ranks, key=lambda one: (one.alive, one.beat.rank))[:_MOST_RANKS]:
        beat = one.beat
        where = f" in {beat.where}" if beat.where else ""
        said = (
            f"  {beat.rank} on {beat.host}, process {beat.pid}: {beat.phase}{where}, step "
            f"{beat.step:,}, {one.age:.0f} s ago{'' if one.alive else ', gone'}"
        )
        lines.append(Text(printable(said), style="" if one.alive else "red"))
    return lines
