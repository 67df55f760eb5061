"""Reading a finished run directory for reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.errors import UserError
from simpro_fast.printable import printables
from simpro_fast.utils.atomic_write import read_json

# Keys without which there is nothing to show.
NEEDED = {"name", "seed", "method", "steps", "top1", "per_class", "class_names", "pi_u"}
METHOD_TITLES = {
    "simpro": "SimPro",
    "fixmatch": "FixMatch",
    "simpro_star": "SimPro*",
    "acr": "ACR",
    "acr_no_anchors": "ACR without anchors",
    "abc": "ABC",
    "cdmad": "CDMAD",
    "cpe": "CPE",
    "daso": "DASO",
}


@dataclass(frozen=True)
class Run:
    """One run: its summary, of names that can be shown, and one metrics object per period."""

    path: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one metric, without the periods where it is null."""
        rows = [(row["step"], row[key]) for row in self.metrics if row.get(key) is not None]
        steps, values = zip(*rows, strict=True) if rows else ((), ())
        return np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)


def load_run(run_dir: Path, summary: dict[str, Any] | None = None) -> Run:
    """Read `summary.json` (unless given) and `metrics.jsonl` of a finished run.

    Raises:
        UserError: a file is missing (the run is not finished) or damaged.
    """
    summary_path = run_dir / "summary.json"
    if summary is not None:
        return Run(run_dir, printables(summary), read_metrics(run_dir / "metrics.jsonl"))
    if not summary_path.is_file():
        raise UserError(f"{run_dir}: {_why_no_summary(run_dir)}")
    summary = read_json(summary_path)
    missing = sorted(NEEDED - set(summary))
    if missing:
        raise UserError(f"{summary_path} is damaged ({', '.join(missing)} missing)")
    return Run(run_dir, printables(summary), read_metrics(run_dir / "metrics.jsonl"))


def _why_no_summary(run_dir: Path) -> str:
    if not run_dir.is_dir():
        return "not a folder" if run_dir.exists() else "no such folder"
    if (run_dir / "config.yaml").is_file():
        return (
            "the run is not finished; start its training command again, which goes on from the "
            "last checkpoint and makes the report at the end"
        )
    # A run lies in <output_dir>/<name>/seed<k>, and most names have a folder of their own.
    below = next(filter(None, (sorted(run_dir.glob(p + "seed*/")) for p in ("", "*/", "*/*/"))), [])
    if not below:
        return "not a run directory; it has neither summary.json nor config.yaml"
    more = f" and {len(below) - 5} more" if len(below) > 5 else ""
    return f"not one run; take one of {', '.join(map(str, below[:5]))}{more}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file; a last line cut short by a killed run is left out."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise UserError(f"{path}: line {number} is not JSON") from None
        if not isinstance(row, dict) or "step" not in row:
            raise UserError(f"{path}: line {number} is not a row of metrics")
        rows.append(row)
    return rows


def run_labels(summary: dict[str, Any], compare: dict[str, Any] | None) -> list[str]:
    """Short names that tell the compared runs apart: the methods, else names, else seeds."""
    summaries = [summary] if compare is None else [summary, compare]
    for describe in (
        lambda s: METHOD_TITLES.get(s["method"], s["method"]),
        lambda s: s["name"],
        lambda s: f"{s['name']} seed {s['seed']}",
    ):
        labels = [describe(s) for s in summaries]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({letter})" for label, letter in zip(labels, "ab", strict=False)]


def kl_of_uniform(truth: list[float]) -> float:
    """KL(truth || uniform) in nats: what an estimate must beat."""
    p = np.asarray(truth, dtype=np.float64)
    seen = p[p > 0]
    return float((seen * np.log(seen * len(p))).sum())
