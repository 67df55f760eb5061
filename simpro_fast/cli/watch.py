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
from simpro_fast.cli.ending import DONE, INTERRUPTED, about, verb
from simpro_fast.cli.parser import CommandParser
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
_SPARKS = "▁▂▃▄▅▆▇█"


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
            print(rendered(frame(run, sys.stdout), sys.stdout, _size()[0]))
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


def _follow(run: LiveRun, interval: float) -> None:
    """On the terminal's second screen; the last frame stays on the first."""
    console = Console(markup=False, emoji=False, highlight=False)
    with Live(frame(run, sys.stdout), console=console, screen=True, auto_refresh=False) as live:
        while not run.has_ended:
            time.sleep(interval)
            run = read_live(run.path)
            live.update(frame(run, sys.stdout), refresh=True)
    print(rendered(frame(run, sys.stdout), sys.stdout, _size()[0]))


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size((100, 40))
    return size.columns, size.lines


def frame(run: LiveRun, out: TextIO) -> RenderableType:
    """One picture of a run, for the encoding and the size of a terminal."""
    columns, lines = _size()
    block, mark = glyphs(out)
    classes = max(_FEWEST_CLASSES, min(_MOST_CLASSES, lines - _OTHER_LINES))
    parts: list[RenderableType] = [
        _heading(run),
        _progress(run, columns, block),
        *_numbers(run, block),
        *_distribution(run, columns, classes, block, mark),
        *_ranks(run),
    ]
    return Group(*parts)


def _heading(run: LiveRun) -> Text:
    config = run.config
    method = METHOD_TITLES.get(config.method.name, config.method.name)
    text = Text.assemble((config.name, "bold"), f" seed {config.seed}, {method}: ")
    text.append(run.state, _COLOURS.get(run.state, "bold red"))
    if run.message:  # of a run that was asked to stop it begins with the same word
        message = run.message.removeprefix(run.state).lstrip()
        text.append(f"{' ' if message.startswith('(') else ': '}{message}")
    return text


def _progress(run: LiveRun, columns: int, block: str) -> Text:
    steps = run.config.train.steps
    share = min(1.0, run.step / steps)
    left = run.seconds_left()
    eta = f"  ETA {clock(left)}" if left is not None else ""
    said = f" step {run.step:,} of {steps:,} ({100 * share:.0f} %){eta}"
    width = max(8, min(50, columns - len(said) - 2))
    done = round(share * width)
    return Text(f"{block * done}{'.' * (width - done)}{said}", no_wrap=True)


def _numbers(run: LiveRun, block: str) -> list[Text]:
    """Speed, losses and accuracy of the last period."""
    if not run.rows:
        why = "metrics.jsonl is missing" if run.state == FINISHED else "no period is complete yet"
        return [Text(f"{why}, so there are no numbers")]
    last = run.rows[-1]

    def number(key: str, form: str, scale: float = 1.0) -> str:
        value = last.get(key)
        return "-" if value is None else format(scale * value, form)

    lines = [
        f"{number('images_per_second', ',.0f')} images/s  data wait "
        f"{number('data_wait_fraction', '.0f', 100)} %  memory "
        f"{number('peak_memory_mib', ',.0f')} MiB  learning rate {number('lr', '.3g')}",
        f"loss {number('loss', '.3f')} (labeled {number('loss_labeled', '.3f')}, unlabeled "
        f"{number('loss_unlabeled', '.3f')})  mask rate {number('mask_rate', '.2f')}  kept "
        f"pseudo-labels right {number('pseudo_label_accuracy', '.1f')} %",
    ]
    tests = [(row["step"], row["top1"]) for row in run.rows if row.get("top1") is not None]
    if tests:
        best = max(tests, key=lambda test: test[1])
        lines.append(
            f"top-1 {tests[-1][1]:.1f} % at step {tests[-1][0]:,}, best {best[1]:.1f} % at step "
            f"{best[0]:,}  {_spark([top1 for _, top1 in tests], block)}"
        )
    return [Text(f"at step {last['step']:,}"), *(Text(f"  {line}") for line in lines)]


def _spark(values: Sequence[float], block: str) -> str:
    """The last 30 values as a row of bars; nothing where the terminal cannot show them."""
    shown = list(values[-30:])
    low, span = min(shown), max(shown) - min(shown)
    if block == "#" or not span:
        return ""
    return "".join(_SPARKS[round((value - low) / span * (len(_SPARKS) - 1))] for value in shown)


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
    if not run.ranks:
        return []
    alive = sum(one.alive for one in run.ranks)
    lines = [Text(f"ranks: {alive} of {len(run.ranks)} live")]
    worst_first = sorted(run.ranks, key=lambda one: (one.alive, one.beat.rank))
    for one in worst_first[:_MOST_RANKS]:
        beat = one.beat
        where = printable(f" in {beat.where}" if beat.where else "")
        lines.append(
            Text(
                f"  {beat.rank} on {printable(beat.host)}, process {beat.pid}: "
                f"{printable(beat.phase)}{where}, step {beat.step:,}, {one.age:.0f} s ago"
                f"{'' if one.alive else ', gone'}",
                style="" if one.alive else "red",
            )
        )
    if len(run.ranks) > _MOST_RANKS:
        lines.append(Text(f"  and {len(run.ranks) - _MOST_RANKS} more"))
    return lines
