"""Is there a better SimPro? Variants of its steps on Fashion-MNIST-LT at 14 px, over seeds.

    python bench/studies.py                                   # all, resumable; skips finished runs
    python bench/studies.py --only reversed --seeds 1 --row loss --threads 1
    python bench/studies.py --commit                          # git commit after every run

Each row changes the short recipe (`configs/_base/short_run.yaml`) by the keys that `STUDIES` names;
rows without keys were of options that are no more, and are trained again at commit 92d1908.
Results are in bench/results/studies.csv (one line per run) and .md; docs/studies.md reads them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment import (
    DISTRIBUTIONS,
    LAUNCHER,
    RESULTS,
    ROOT,
    commit,
    members,
    read_rows,
    row,
    spread,
    write_csv,
)

from simpro_fast.cli.members import train_members
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.file_lock import locked

DATASET, SIDE = "fashion_mnist_lt", 14
PUBLISHED = "published"
STUDIES: dict[str, dict[str, tuple[str, ...] | None]] = {
    "E step": {
        PUBLISHED: (),
        "tau 2": ("method.tau=2",),
        "tau 2, calibrated": None,
    },
    "Counts of phi": {
        PUBLISHED: (),
        "loss": ("method.phi_counts=loss",),
        "alpha auto": ("method.alpha=auto",),
        "alpha auto, alpha": None,
    },
    "Start": {
        PUBLISHED: (),
        "hold 10 periods": None,
        "balanced 100 steps": ("data.class_balanced_steps=100",),
        "all rows": ("method.prior_rows=all",),
        "balanced 100 steps, all rows": (
            "data.class_balanced_steps=100",
            "method.prior_rows=all",
        ),
        "balanced 100 steps, loss": (
            "data.class_balanced_steps=100",
            "method.phi_counts=loss",
        ),
        "growing momentum": None,
    },
}
"""Study, row, what the row changes; None: it cannot be trained here any more."""
ORDER = [name for rows in STUDIES.values() for name in rows]
ROWS = {k: v for rows in STUDIES.values() for k, v in rows.items() if v is not None}
EARLY = (10, 20)
"""Periods after which the estimate is looked at, beside the last one."""
FIELDS = (
    *("row", "distribution", "seed", "steps", "top1", "kl_10", "kl_20", "kl_pi_u", "kl_uniform"),
    *("seconds", "threads", "torch", "dali", "deepspeed", "commit", "machine"),
)


def study_row(name: str, distribution: str, folder: Path) -> dict[str, Any]:
    """One line of the results, from the files of a finished run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    periods = {line["period"]: line["kl_pi_u"] for line in map(json.loads, lines)}
    found = {**row(distribution, folder), "row": name}
    found |= {f"kl_{period}": round(periods[period], 4) for period in EARLY}
    return {key: found[key] for key in FIELDS}


def add(new: dict[str, Any]) -> None:
    """Add one run; several runners may work at once."""
    with locked(RESULTS, "check its permissions", folder=True):
        rows = [*read_rows("studies"), new]
        places = list(DISTRIBUTIONS)
        rows.sort(
            key=lambda r: (ORDER.index(r["row"]), places.index(r["distribution"]), int(r["seed"]))
        )
        write_csv("studies", FIELDS, rows)
        write_atomically(RESULTS / "studies.md", table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: of each study top-1, and KL(true, pi_u) early and at the end."""
    lines = []
    for study, changes in STUDIES.items():
        lines += [
            f"| {study} | distribution | seeds | top-1 % | KL, step 100 | step 200 | step 600 |",
            "|---|---|---|---|---|---|---|",
        ]
        for distribution, name in itertools.product(DISTRIBUTIONS, changes):
            mine = [r for r in rows if (r["row"], r["distribution"]) == (name, distribution)]
            if not mine:
                continue
            columns = [spread([float(r["top1"]) for r in mine], 1)]
            for key in ("kl_10", "kl_20", "kl_pi_u"):
                columns.append(spread([float(r[key]) for r in mine], 2))
            lines.append(f"| {name} | {distribution} | {len(mine)} | {' | '.join(columns)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train and table variants of SimPro.")
    parser.add_argument("--only", choices=DISTRIBUTIONS, nargs="+", default=["reversed", "uniform"])
    parser.add_argument("--row", choices=list(ROWS), nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, help="CPU threads of torch and of the data pipeline")
    parser.add_argument("--commit", action="store_true", help="git commit after every run")
    options = parser.parse_args()
    os.chdir(ROOT)  # runs/ and launch/ lie here
    for seed, name, distribution in itertools.product(options.seeds, options.row, options.only):
        shown = (name, distribution, str(seed))
        done = read_rows("studies")
        if any((r["row"], r["distribution"], str(r["seed"])) == shown for r in done):
            print(f"{', '.join(shown)}: already in the results")
            continue
        kind = f"_{SIDE}px"
        changes = [f"data.image_size={SIDE}", "evaluate.every=60"]
        if name != PUBLISHED:
            kind += "_" + name.replace(",", "").replace(" ", "_")
            changes += ROWS[name]
        cell = (distribution, "simpro", seed)
        member = members(DATASET, [cell], options.threads, kind, changes)[cell]
        if code := train_members([member], LAUNCHER):
            return code
        add(study_row(name, distribution, member.run_dir))
        if options.commit:
            commit("studies", f"Result: studies, {', '.join(shown)}")
    print(table(read_rows("studies")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
