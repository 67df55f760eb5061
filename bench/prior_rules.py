"""Other rules for SimPro's pi_u, and their ceiling: shrinkage, and class shares that are given.

    python bench/prior_rules.py features --set model.weights=.photos/lite0.safetensors
    python bench/prior_rules.py digits --only SimPro "shrinkage 0.02" "given: truth"

Tables, split seeds and numbers as in split_tables.py. `shrinkage w`: after every update pi_u moves
by w towards the uniform distribution; `falling`: by 200 / (200 + images kept so far). `given`: pi_u
is fixed from the first step on, at the true shares (the ceiling of any estimate) or at the Bayesian
estimate of the SimPro run of the same split (two stages). A weight is chosen on the odd split seeds
and reported on the even ones. Rows go to bench/results/prior_rules_<table>.csv, the table to .md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from common import RESULTS
from pydantic import Field
from split_tables import (
    DISTRIBUTIONS,
    METHODS,
    START,
    TABLES,
    Found,
    Table,
    Words,
    add,
    mean,
    numbers,
    of,
    over_distributions,
    read,
    trained,
    with_start,
)

from simpro_fast.config.methods import SimProConfig
from simpro_fast.methods import SimPro
from simpro_fast.utils.atomic_write import write_atomically

SHRUNK = "method.name=prior_rules.Shrunk"
TRUTH, ESTIMATE = "given: truth", "given: Bayesian estimate"
PLAIN, BALANCED = "SimPro", ", balanced start"
WEIGHTS = (0.01, 0.02, 0.05)
RULES: dict[str, Words] = {
    PLAIN: METHODS[PLAIN],
    **{f"shrinkage {w}": (SHRUNK, f"method.shrinkage={w}") for w in WEIGHTS},
    "shrinkage, falling": (SHRUNK, "method.images=200"),
    TRUTH: METHODS[PLAIN],
    ESTIMATE: METHODS[PLAIN],
}
ROWS = {
    rule + start: words + ((START,) if start else ())
    for start in ("", BALANCED)
    for rule, words in RULES.items()
}


class ShrunkConfig(SimProConfig):
    shrinkage: float = Field(0.0, ge=0, lt=1)
    """Weight of the uniform distribution after every update."""
    images: float = Field(0.0, ge=0)
    """Instead, as if so many images had been seen of the uniform distribution."""


class Shrunk(SimPro):
    """SimPro whose pi_u is drawn towards the uniform distribution after every update."""

    Config = ShrunkConfig
    kept_images: torch.Tensor

    def __init__(self, *args: Any, shrinkage: float, images: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shrinkage, self.images = shrinkage, images
        self.register_buffer("kept_images", torch.zeros_like(self.pi_u[0]))

    def update_priors(self) -> None:
        self.kept_images += self.over_ranks(self.unlabeled_mass).sum()
        super().update_priors()
        weight = self.shrinkage
        if self.images:
            weight = float(self.images / (self.images + self.kept_images))
        self.pi_u.lerp_(torch.full_like(self.pi_u, 1 / self.num_classes), weight)


def given(row: str, first: dict[str, Any]) -> Words:
    """The shares that a row is given; first: the summary of the SimPro run of its split."""
    if row.startswith(TRUTH):
        return (f"method.prior={json.dumps(first['pi_u_true'])}",)
    if row.startswith(ESTIMATE):
        return (f"method.prior={json.dumps([r['estimate'] for r in first['shares']['rows']])}",)
    return ()


def cell(
    table: Table, rows: Sequence[str], distribution: str, seed: str, done: Found, words: Words
) -> Iterator[Found]:
    """The missing rows of one split and distribution.

    Args:
        words: changes of the configuration, for every run.
    """
    missing = [row for row in rows if (row, distribution, seed) not in done]
    first: dict[str, Any] = {}
    if PLAIN in missing or any(row.startswith("given") for row in missing):
        own = (*ROWS[PLAIN], "evaluate.shares_images=2000", *words)
        first = trained(table, own, distribution, seed)
        if PLAIN in missing:
            yield {(PLAIN, distribution, seed): numbers(first)}
    for row in missing:
        if row != PLAIN:
            own = (*with_start(ROWS[row], table), *given(row, first), *words)
            yield {(row, distribution, seed): numbers(trained(table, own, distribution, seed))}


def markdown(found: Found) -> str:
    """Paired differences to SimPro with the same start, on the odd and on the even split seeds."""
    lines: list[str] = []
    for start, half in itertools.product(("", BALANCED), (1, 0)):
        seeds = sorted({seed for _, _, seed in found if int(seed) % 2 == half}, key=int)
        rows = []
        for rule in RULES:
            rival = None if rule == PLAIN else PLAIN + start
            cells = of(found, rule + start, rival, seeds, "class_mean")
            if together := over_distributions(cells):
                shown = [mean(list(values.values()), 2) for values in cells]
                shown += [mean(together, 2), str(len(together))]
                rows.append(f"| {rule} | {' | '.join(shown)} |")
        if rows:
            title = f"{PLAIN}{start}, {'odd' if half else 'even'} split seeds"
            head = f"| {title} | {' | '.join(DISTRIBUTIONS)} | all | split seeds |"
            lines += [head, "|---" * 8 + "|", *rows, ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="*", default=range(1, 11), help="split seeds")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=ROWS, help="some rows")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for every run")
    options = parser.parse_args()
    logging.getLogger("simpro_fast").setLevel(logging.WARNING)
    table, path = TABLES[options.table], RESULTS / f"prior_rules_{options.table}.csv"
    for seed, distribution in itertools.product(map(str, options.seeds), DISTRIBUTIONS):
        rows = options.only or list(ROWS)
        for new in cell(table, rows, distribution, seed, read(path), tuple(options.set)):
            add(path, new)
            print(new, file=sys.stderr, flush=True)
    write_atomically(path.with_suffix(".md"), text := markdown(read(path)))
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
