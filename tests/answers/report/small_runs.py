"""The smallest runs that can be reported: a summary and a few rows of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.answers.report.groups import Group, group_runs
from simpro_fast.answers.report.runs import Run
from simpro_fast.utils.printable import printables


def make_summary(num_classes: int = 4, method: str = "simpro", **values: Any) -> dict[str, Any]:
    counts = np.array([100 * 2 ** min(k, 40) for k in range(num_classes)], dtype=object)
    truth = [float(c / counts.sum()) for c in counts]
    estimate = truth[::-1] if method == "fixmatch" else truth
    summary = {
        "name": "toy_lt/reversed",
        "seed": 1,
        "method": method,
        "steps": 1200,
        "top1": 81.25,
        "top1_class_mean": 80.5,
        "top1_mean_last20": 79.0,
        "top1_best": 82.0,
        "per_class": [max(0.0, 90.0 - k) for k in range(num_classes)],
        "class_names": [f"name{k}" for k in range(num_classes)],
        "many": 88.0,
        "medium": 77.5,
        "few": None,
        "kl_pi_u": 0.0625,
        "pi_u": estimate,
        "pi_u_true": truth,
        "labeled_counts": [150 - k for k in range(num_classes)],
        "unlabeled_counts": [int(c) for c in counts],
        "seconds": 51.4,
        "images_per_second": 6400.3,
        "commit": "0123456",
        "machine": "2 cores",
    }
    return summary | values


def write_run(path: Path, summary: dict[str, Any], periods: int = 6, **row: Any) -> Path:
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(summary))
    rows = [
        {
            "step": 200 * (i + 1),
            "period": i + 1,
            "mask_rate": 0.1 * i,
            "pseudo_label_accuracy": 90.0 - i,
            "kl_pi_u": 1.0 / (i + 1),
            "top1": 50.0 + i if i % 2 else None,
        }
        | row
        for i in range(periods)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def groups_of(*summaries: dict[str, Any]) -> list[Group]:
    return group_runs([Run(Path(f"run{i}"), printables(s), []) for i, s in enumerate(summaries)])
