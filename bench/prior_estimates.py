"""How far is each estimate of the unlabeled class distribution from the truth, and when?

    python bench/prior_estimates.py                        # the table of all methods
    python bench/prior_estimates.py --runs elsewhere/runs --kind _14px_1200 --results longer

Looks at the finished runs <runs>/<name>/<distribution><kind>/method.name-<method>/seed<k>, as
bench/experiment.py leaves them, and trains nothing. Of each:

    pi_u   what the run logged after every period (in the table after 5, 10, 20, 40 and the last)
    BBSE   black-box shift estimation, with 100 labeled images of each class of the test part, drawn
           by the seed, for the confusion matrix
    EM     expectation maximisation (Saerens et al.), started at phi

BBSE and EM are of the final network, on the logits of the run's unlabeled images. Results are in
bench/results/prior_estimates.csv (a line per run), _curves.csv (KL of pi_u after every period), .md
(tables) and .png. A run whose line is there is not measured again, unless it was trained anew.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from experiment import DISTRIBUTIONS, METHODS, RESULTS, ROOT, Cell, read_rows, write_csv
from finished_runs import PER_CLASS, calibrate, open_run, stamped, stamps
from prior_figure import draw

from simpro_fast.answers.estimation.point_shares import black_box_shares, em_shares
from simpro_fast.answers.evaluation import kl_divergence
from simpro_fast.answers.report.runs import load_run
from simpro_fast.utils.atomic_write import read_json, write_atomically
from simpro_fast.utils.errors import ConfigError, UserError

OWN = ("simpro", "simpro_star", "acr", "acr_no_anchors", "daso")
"""Methods whose `pi_u` is an estimate of their own; of others it counts kept pseudo-labels."""
AFTER = (5, 10, 20, 40)
"""Periods after which pi_u is looked at, beside the last one."""
ESTIMATES = (*map(str, AFTER), "last", "bbse", "em", "uniform")
FIELDS = (
    *("set", "distribution", "method", "estimate", "seed", "steps", "top1"),
    *(f"{distance}_{name}" for distance in ("kl", "l1") for name in ESTIMATES),
    *("calibrated_with", "em_converged", "trained_at", "commit", "torch", "numpy", "machine"),
)
CURVE_FIELDS = ("distribution", "method", "seed", "steps", "period_steps", "kl")


def runs_of(root: Path, name: str, kind: str) -> tuple[dict[Cell, Path], list[str]]:
    """Finished runs below `root`/`name`, and what was left out there and why.

    Raises:
        UserError: there is no finished run.
    """
    found: dict[Cell, Path] = {}
    left_out = []
    for distribution in DISTRIBUTIONS:
        folder = root / name / f"{distribution}{kind}"
        if not folder.is_dir():
            left_out.append(f"{folder}: no such folder")
            continue
        for path in sorted(p for p in folder.glob("*/*") if not p.name.startswith(".")):
            method, seed = path.parent.name.removeprefix("method.name-"), path.name[4:]
            known = path.parent.name == f"method.name-{method}" and method in METHODS
            if not (known and path.name.startswith("seed") and seed.isdecimal()):
                left_out.append(f"{path}: no run of bench/experiment.py")
            elif not (path / "summary.json").is_file():
                left_out.append(f"{path}: not finished")
            else:
                found[distribution, method, int(seed)] = path
    if not found:
        raise UserError(
            f"{root / name}: no finished run in a folder <distribution>{kind}; train some by "
            f"bench/experiment.py, or give other --runs, --name or --kind"
        )
    return found, left_out


def distances(counts: Sequence[int], estimate: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """KL(true || estimate) in nats, and L1 = sum |true - estimate|, 0 to 2.

    Args:
        counts: true images of each class, [K]. estimate: [K], of any positive sum.
    """
    truth, shares = np.array(counts) / sum(counts), np.array(estimate) / sum(estimate)
    return kl_divergence(counts, shares.tolist()), float(np.abs(truth - shares).sum())


def measure(cell: Cell, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line of a finished run, without `set`, and its curve.

    Raises:
        UserError: a file of the run is missing or damaged, or the true classes are not known.
    """
    distribution, method, seed = cell
    told = load_run(folder)
    counts, steps = told.summary.get("unlabeled_counts"), told.summary["steps"]
    if not counts:
        raise UserError(
            f"{folder}: the true classes of the unlabeled images are not known, so there is "
            "nothing to compare with; take runs on a set that has them"
        )
    periods = [row.get("period") for row in told.metrics]
    if not periods or periods != list(range(1, len(periods) + 1)):
        raise UserError(f"{folder / 'metrics.jsonl'}: not one line for each period; train again")
    every = told.metrics[0]["step"]
    logged = [distances(counts, row["pi_u"]) for row in told.metrics]
    named = {str(n): logged[n - 1] for n in AFTER if n <= len(logged)}

    run = open_run(folder)
    phi = run.model.file.phi
    logits = run.logits(run.dataset.unlabeled_pool, run.split.unlabeled)
    rng = np.random.default_rng((seed, DISTRIBUTIONS.index(distribution)))
    calibration = calibrate(run, rng)
    predicted = np.bincount(logits.argmax(axis=1), minlength=len(counts))
    em = em_shares(run.model.probabilities(logits, phi), np.array(phi))
    named |= {
        "last": logged[-1],
        "bbse": distances(counts, black_box_shares(calibration.confusion, predicted)),
        "em": distances(counts, em.shares),
        "uniform": distances(counts, np.ones(len(counts))),
    }
    key = {"distribution": distribution, "method": method, "seed": seed, "steps": steps}
    line = {
        **key,
        "estimate": "own" if method in OWN else "counted",
        "top1": round(told.summary["top1"], 2),
        **{f"kl_{name}": round(kl, 4) for name, (kl, _) in named.items()},
        **{f"l1_{name}": round(l1, 4) for name, (_, l1) in named.items()},
        "calibrated_with": len(calibration.targets),
        "em_converged": em.converged,
        "trained_at": told.summary["commit"],
        **stamps(),
    }
    curve = " ".join(f"{kl:.4f}" for kl, _ in logged)
    return line, {**key, "period_steps": every, "kl": curve}


def cell_of(line: dict[str, Any]) -> Cell:
    return line["distribution"], line["method"], int(line["seed"])


def place(line: dict[str, Any]) -> tuple[int, int, int]:
    distribution, method, seed = cell_of(line)
    return DISTRIBUTIONS.index(distribution), list(METHODS).index(method), seed


def write(name: str, lines: list[dict[str, Any]], curves: list[dict[str, Any]]) -> None:
    lines, curves = sorted(lines, key=place), sorted(curves, key=place)
    write_csv(f"{name}_curves", CURVE_FIELDS, curves)
    write_csv(name, FIELDS, lines)
    write_atomically(RESULTS / f"{name}.md", table(lines))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: means over distributions and seeds, then each distribution."""
    shown = [d for d in DISTRIBUTIONS if any(r["distribution"] == d for r in lines)]
    parts = []
    if len(shown) > 1:
        parts += ["## Mean over distributions", "", *_block(lines, shown), ""]
    for distribution in shown:
        parts += [f"## {distribution}", "", *_block(lines, [distribution]), ""]
    stopped = [" ".join(map(str, cell_of(r))) for r in lines if str(r["em_converged"]) != "True"]
    used = {str(r["set"]) for r in lines}
    return "\n".join(
        [
            f"# Estimates of the unlabeled class distribution: {', '.join(sorted(used))}",
            "",
            "KL(true || estimate) in nats, where a share of 0 counts as 1e-6, and L1 = "
            "sum |true - estimate|, 0 to 2; means over the seeds.",
            "",
            *parts,
            "**5** to **last**: pi_u after so many periods; each starts uniform. `own`: the "
            "method's own estimate, which training follows; that of ACR without anchors is only "
            "logged, and SimPro* soon takes the labeled, the uniform or the reversed distribution "
            "instead of it. `counted`: a moving average over kept pseudo-labels, which is tracked "
            "for comparison and changes nothing.",
            "",
            "**BBSE**, **EM**: black-box shift estimation and expectation maximisation on what the "
            "final network says of the unlabeled images. BBSE alone is told classes of more "
            f"images than training: {lines[0]['calibrated_with']} of the test part ({PER_CLASS} of "
            "each class). EM takes softmax(f + tau log phi) for the posterior under phi, with the "
            "tau of the loss: 0, so softmax(f), but for SimPro and SimPro*. A method's test rule "
            "is part of its network, so where that is balanced, EM rests on a posterior of another "
            "distribution.",
            "",
            f"Without a run: {_missing(lines)}.",
            "",
            f"EM stopped before it converged: {', '.join(stopped) or 'never'}.",
            "",
            *stamped(lines),
            "",
            "Again: `python bench/prior_estimates.py`, once bench/experiment.py has trained.",
            "",
        ]
    )


def _missing(lines: Sequence[dict[str, Any]]) -> str:
    """Methods that have no line, by distribution."""
    found = []
    for distribution in DISTRIBUTIONS:
        here = {r["method"] for r in lines if r["distribution"] == distribution}
        titles = [title for method, title in METHODS.items() if method not in here]
        if titles:
            found.append(f"{distribution} ({', '.join(titles) if here else 'all methods'})")
    return "; ".join(found) or "none"


def _block(lines: Sequence[dict[str, Any]], distributions: Sequence[str]) -> list[str]:
    """One table; the mean of several distributions weighs each alike."""
    inner = [f"kl_{name}" for name in ESTIMATES[:-1]] + ["l1_last", "l1_bbse", "l1_em"]
    heads = ["method", "pi_u", "runs", *(f"KL {n}" for n in AFTER)]
    heads += ["KL last", "KL BBSE", "KL EM", "L1 last", "L1 BBSE", "L1 EM"]
    rows = [heads]
    part = [r for r in lines if r["distribution"] in distributions]
    for estimate, (method, title) in itertools.product(("own", "counted"), METHODS.items()):
        mine = [r for r in part if (r["method"], r["estimate"]) == (method, estimate)]
        if not mine:
            continue
        covered = {r["distribution"] for r in mine}
        runs = f"{len(mine)}"
        if len(covered) < len(distributions):
            runs += f" (of {len(covered)} distributions)"
        rows.append([title, estimate, runs, *(_mean(mine, key) for key in inner)])
    uniform = ["kl_uniform"] * (len(AFTER) + 3) + ["l1_uniform"] * 3
    rows.append(["uniform guess", "", "", *(_mean(part, key) for key in uniform)])
    text = [f"| {' | '.join(row)} |" for row in rows]
    return [text[0], "|---" * len(heads) + "|", *text[1:]]


def _mean(lines: Sequence[dict[str, Any]], key: str) -> str:
    """Of the means of the distributions; `-` where a run has no such number."""
    values: dict[str, list[float]] = {}
    for line in lines:
        if line.get(key) in (None, ""):
            return "-"
        values.setdefault(line["distribution"], []).append(float(line[key]))
    return f"{fmean(map(fmean, values.values())):.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Distance of estimated class distributions.")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where the runs lie")
    parser.add_argument("--name", default="fashion_mnist_lt", help="data set of the runs")
    parser.add_argument(
        "--kind",
        default="_14px_800",
        help="what their folders have after that of the distribution (_14px_800)",
    )
    parser.add_argument(
        "--results", default="prior_estimates", help="name in bench/results, or a path, without end"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results, name = options.results, f"{options.name}{options.kind}"
    found, left_out = runs_of(options.runs, options.name, options.kind)
    lines, curves = read_rows(results), read_rows(f"{results}_curves")
    if other := sorted({r["set"] for r in lines} - {name}):
        raise ConfigError(
            f"{RESULTS / results}.csv holds {other[0]}, and these runs are {name}; give another "
            "--results"
        )
    new = 0
    for cell, folder in found.items():
        summary = read_json(folder / "summary.json")
        stamp = [cell, str(summary["steps"]), summary["commit"] or ""]
        if stamp in [[cell_of(r), str(r["steps"]), r["trained_at"] or ""] for r in lines]:
            continue
        line, curve = measure(cell, folder)
        lines = [*(r for r in lines if cell_of(r) != cell), {"set": name, **line}]
        curves = [*(r for r in curves if cell_of(r) != cell), curve]
        write(results, lines, curves)
        shown = ("kl_last", "kl_bbse", "kl_em", "kl_uniform")
        print(*cell, *(f"{key} {line[key]:.3f}" for key in shown), flush=True)
        new += 1
    # Again, so that a new table or figure needs no new run.
    write(results, lines, curves)
    draw(RESULTS / f"{results}.png", lines, curves, own=OWN, title=name)
    print((RESULTS / f"{results}.md").read_text(encoding="utf-8"))
    for text in left_out:
        print(f"left out: {text}")
    print(f"{new} runs measured, {len(found) - new} were in the results, {len(left_out)} left out")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
