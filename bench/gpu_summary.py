"""Predicted beside measured: the last thing that bench/gpu_check.sh does, whatever it has run.

    python bench/gpu_summary.py bench/results/gpu_check [what failed ...]

bench/predicted_h100.csv has the predictions, for one H100 that copies 3,000 GB/s, with the count
that each came from. It names the CSV file of the folder, the column, and the values that a row must
have to answer; the last such row counts. Prints the table, and writes it to summary.md.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

PREDICTED = Path(__file__).with_name("predicted_h100.csv")
MACHINE = "NVIDIA H100 80GB HBM3, 3,000 GB/s"


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(low: float, high: float) -> str:
    return short(low) if short(low) == short(high) else f"{short(low)} to {short(high)}"


def cells(folder: Path, measured_at: set[str]) -> Iterator[list[str]]:
    """What, predicted, measured and their ratio; adds where each was measured."""
    for wanted in read(PREDICTED):
        where = dict(pair.split("=") for pair in wanted["where"].split(";")).items()
        column, unit = wanted["column"], wanted["unit"]
        rows = [r for r in read(folder / wanted["file"]) if where <= r.items() and r.get(column)]
        bounds = [float(wanted[name]) for name in ("low", "high") if wanted[name]]
        predicted, measured, ratio = "-", "not measured", "-"
        if bounds:
            predicted = f"{span(*bounds)} {unit}"
        if rows:
            value = float(rows[-1][column])
            measured = f"{short(value)} {unit}"
            measured_at.add(f"{rows[-1]['machine']}, commit {rows[-1]['commit']}")
            if bounds:
                ratio = span(*sorted(value / bound for bound in bounds))
        yield [wanted["what"], predicted, measured, ratio]


def summary(folder: Path, failed: list[str]) -> str:
    """The table as Markdown whose columns are aligned, where it was measured, and what failed."""
    measured_at = set[str]()
    table = [["what", "predicted", "measured", "ratio"], *cells(folder, measured_at)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    lines = []
    for row in table:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"| {' | '.join(padded)} |")
    lines += ["", f"Predicted for: {MACHINE}"]
    lines += [f"Measured on: {place}" for place in sorted(measured_at)]
    lines += [f"Failed: {name}" for name in failed]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    text = summary(Path(arguments[0]), arguments[1:])
    (Path(arguments[0]) / "summary.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
