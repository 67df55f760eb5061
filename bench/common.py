"""What the benches share: the line of the machine, rows of result files, bars, argument types."""

import argparse
import csv
import importlib.util
import io
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.machine import processor_name
from simpro_fast.utils.provenance import git_commit

RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).parent / "results")


def machine() -> dict[str, str]:
    """Where a number was measured: device, versions, commit ("+" where files differ from it)."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor_name()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    return {
        "machine": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": git_commit() or "unknown",
        "load": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "none"
    return str(importlib.import_module(package).__version__)


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: names with commas between them, each one of `known`.

    Overrides may follow, which `nargs` would swallow.
    """
    valid = list(known)

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in valid:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(valid)}")
        return names

    return parse


def write_table(path: Path, rows: Sequence[dict[str, Any]], *, replace: Sequence[str]) -> None:
    """Add rows with this machine's line to a result file.

    A row of this machine that is already there is replaced where it agrees with a new one in all
    columns of `replace`; rows of other machines stay.
    """
    here = machine()
    fresh = [{**row, **here} for row in rows]
    fields = list(fresh[0])

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(name)) for name in (*replace, "machine"))

    new = {key(row) for row in fresh}
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if key(row) not in new]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, fields, extrasaction="ignore")
    writer.writeheader()
    writer.writerows([*kept, *fresh])
    write_atomically(path, table.getvalue(), durable=False)


def can_draw(path: Path) -> bool:
    """Whether matplotlib is installed; says that the figure is left out where not."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name} not drawn: pip install -e '.[report]'")
        return False
    return True


def save_bars(
    path: Path, labels: Sequence[str], series: dict[str, Sequence[float]], *, title: str
) -> None:
    """One group of horizontal bars per label, with the values written at their ends."""
    if not can_draw(path):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.45 * len(labels) * len(series)), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [i + index * height for i in range(len(labels))]
        bars = axis.barh(places, values, height * 0.9, label=name)
        axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.set_yticks([i + 0.4 - height / 2 for i in range(len(labels))], labels)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    if len(series) == 1:
        axis.set_xlabel(next(iter(series)))
    else:
        axis.legend(frameon=False)
    axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110)
