"""Reading run directories for reports: finished ones, and what there is of the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.config.saved import read_saved_tree
from simpro_fast.data.splits.split import JSON_NAME as SPLIT
from simpro_fast.data.splits.split import SplitFile
from simpro_fast.run.files import (
    ENVIRONMENT,
    METRICS,
    SUMMARY,
    Summary,
    read_environment,
    read_metrics,
    read_summary,
)
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import checked, read_as
from simpro_fast.utils.printable import printables

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
    "crest_plus": "CReST+",
    "darp": "DARP",
    "adello": "ADELLO",
    "cossl": "CoSSL",
    "cpg": "CPG",
    "ccl": "CCL",
}


@dataclass(frozen=True)
class Run:
    """One run: its summary, of names that can be shown, and one metrics object per period.

    Of a run that is not finished the summary holds what its configuration, its split and its last
    period say.
    """

    path: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    state: str = ""
    """Empty for a finished run, else such as `running, step 60 of 120`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Contents of config.yaml; empty without the file, and so are the next two."""
    environment: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    """Contents of split.json."""

    @property
    def experiment(self) -> str:
        """The name that all repetitions share, whatever their split."""
        return without_split_seed(str(self.summary["name"]))

    @property
    def split_seed(self) -> int | None:
        """`data.split_seed`, which draws the split; None: the published rule, or not known."""
        seed = self.config.get("data", {}).get("split_seed")
        return seed if isinstance(seed, int) else None

    @property
    def split_id(self) -> str:
        """Which images of which data are labeled, unlabeled and tested; empty where unknown."""
        rows = self.split.get("hash") or self.environment.get("split")
        return f"{rows} {self.environment.get('data')}" if rows else ""

    @property
    def repetition(self) -> str:
        """What tells the run from others of its experiment: `seed 1, split seed 2`."""
        split = "" if self.split_seed is None else f", split seed {self.split_seed}"
        return f"seed {self.summary['seed']}{split}"

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one metric, without the periods where it is null.

        For a metric per class the values are [periods, K], NaN where one class has none.
        """
        rows = [(row["step"], row[key]) for row in self.metrics if row.get(key) is not None]
        steps, values = zip(*rows, strict=True) if rows else ((), ())
        return np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)


def without_split_seed(name: str) -> str:
    """A name, or a path, without the folder that a sweep makes for each `data.split_seed`."""
    kept = (p for p in name.split("/") if not re.fullmatch(r"data\.split_seed-\w+", p))
    return "/".join(kept) or name


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories that paths stand for: a run for itself, a folder for all runs below it.

    Raises:
        UserError: a path is no folder, or has no run below it.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
        below = [path] if is_run(path) else sorted(_runs_below(path))
        if not below:
            raise UserError(
                f"{path}: neither a run (it has no summary.json and no config.yaml) nor a folder "
                "with runs in it"
            )
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def is_run(path: Path) -> bool:
    return (path / SUMMARY).exists() or (path / "config.yaml").is_file()


def _runs_below(path: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(path):
        here = Path(folder)
        if here != path and is_run(here):
            names.clear()
            yield here


def load_run(run_dir: Path, summary: dict[str, Any] | None = None) -> Run:
    """Read a run directory; of an unfinished run what there is.

    Args:
        summary: of a run that is finished and has not written it yet.

    Raises:
        UserError: it is no run directory, or a file of it is missing or damaged.
    """
    if summary is None:
        if not is_run(run_dir):
            find_runs([run_dir])
            raise UserError(f"{run_dir}: a folder of runs, and not one run")
        if (run_dir / SUMMARY).exists():
            summary = read_summary(run_dir / SUMMARY)
    readers = {
        "config": ("config.yaml", read_saved_tree),
        "environment": (ENVIRONMENT, read_environment),
        "split": (SPLIT, lambda path: read_as(path, SplitFile).model_dump()),
    }
    rest: dict[str, Any] = {
        key: printables(read(run_dir / name)) if (run_dir / name).exists() else {}
        for key, (name, read) in readers.items()
    }
    path, config = run_dir / METRICS, rest["config"]
    if summary is not None:
        metrics = read_metrics(path, len(summary["class_names"]))
        return Run(run_dir, printables(summary), metrics, **rest)
    class_names = rest["split"].get("class_names")
    if not class_names:
        raise UserError(f"{run_dir}: the run has only begun, and has no {SPLIT} to report yet")
    metrics = read_metrics(path, len(class_names)) if path.exists() else []
    summary = _so_far(config, rest["split"], metrics)
    checked(summary, Summary, run_dir / "config.yaml")
    steps = config.get("train", {}).get("steps")
    place = f"step {summary['steps']:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    return Run(run_dir, summary, metrics, f"not finished, {place}", **rest)


def _so_far(
    config: dict[str, Any], split: dict[str, Any], metrics: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what summary.json would say after the last period."""

    def last(key: str) -> Any:
        return next((row[key] for row in reversed(metrics) if row.get(key) is not None), None)

    tested = [row["top1"] for row in metrics if row.get("top1") is not None]
    unlabeled = split.get("unlabeled_counts")
    return {
        "name": config.get("name"),
        "seed": config.get("seed"),
        "method": config.get("method", {}).get("name"),
        "class_names": split.get("class_names"),
        "labeled_counts": split.get("labeled_counts"),
        "steps": metrics[-1]["step"] if metrics else 0,
        **{key: last(key) for key in ("top1", "top1_class_mean", "per_class", "pi_u", "kl_pi_u")},
        "top1_mean_last20": sum(tested[-20:]) / len(tested[-20:]) if tested else None,
        "top1_best": max(tested, default=None),
        "unlabeled_counts": unlabeled,
        "pi_u_true": [count / sum(unlabeled) for count in unlabeled] if unlabeled else None,
    }


def kl_of_uniform(truth: list[float]) -> float:
    """KL(truth || uniform) in nats: what an estimate must beat."""
    p = np.asarray(truth, dtype=np.float64)
    seen = p[p > 0]
    return float((seen * np.log(seen * len(p))).sum())
