"""Do the intervals of `simpro-fast shares` cover the truth? Five distributions, three seeds.

    python bench/shares_coverage.py                      # trains what is missing, then estimates
    python bench/shares_coverage.py --only reversed --seeds 1
    python bench/shares_coverage.py --no-train           # of the runs that are finished

Every run is configs/fashion_mnist_lt/<distribution> as it stands (600 steps of a small network on
the CPU, four to five minutes of one core). Of each, two sets of images are estimated:

    trained  the unlabeled set that the run was trained on
    fresh    other images of the same class distribution, neither trained on nor calibrated with

Both are calibrated with 100 images of each class of the test part, drawn by the seed; the rest of
the test part is not used. Results are in bench/results/shares_coverage.csv (a line per run and set)
and .md (table). Finished runs and lines are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import DISTRIBUTIONS, ROOT, read_rows, write_csv
from finished_runs import PER_CLASS, calibrate, open_run, stamped, stamps

from simpro_fast.answers.estimation.bayesian import bayesian_shares
from simpro_fast.answers.estimation.calibration import fit_temperature
from simpro_fast.answers.estimation.point_shares import black_box_shares, em_shares
from simpro_fast.answers.estimation.posterior import posterior
from simpro_fast.answers.evaluation import kl_divergence
from simpro_fast.utils.atomic_write import read_json, write_atomically

RESULTS = ROOT / "bench" / "results" / "shares_coverage"
KINDS = ("trained", "fresh")
ESTIMATORS = ("bayesian", "black_box", "em", "em_temperature", "mean_posterior", "pi_u", "uniform")


def run_folder(distribution: str, seed: int) -> Path:
    return ROOT / "runs" / "shares_coverage" / distribution / f"seed{seed}"


def train(distribution: str, seed: int, threads: int) -> None:
    """One run, unless it is finished; an interrupted one goes on."""
    if (run_folder(distribution, seed) / "summary.json").is_file():
        return
    command = [
        *(sys.executable, "launch/train.py"),
        *("--config", f"configs/fashion_mnist_lt/{distribution}.yaml"),
        *(f"name=shares_coverage/{distribution}", f"seed={seed}"),
        *("log.progress=off", "log.figures=false"),
        *(f"train.threads={threads}", f"train.data_threads={threads}"),
    ]
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def fresh_rows(labels: np.ndarray, used: np.ndarray, counts: np.ndarray, rng: Any) -> np.ndarray:
    """Unused images in the class proportions of `counts`, as many as there are."""
    free = [np.setdiff1d(np.flatnonzero(labels == k), used) for k in range(len(counts))]
    scale = min(1.0, min(len(f) / n for f, n in zip(free, counts, strict=True) if n))
    chosen = [
        rng.choice(f, round(scale * n), replace=False) for f, n in zip(free, counts, strict=True)
    ]
    return np.concatenate(chosen)


def measure(distribution: str, seed: int) -> list[dict[str, Any]]:
    """A line for each of the two sets of images of a run."""
    folder = run_folder(distribution, seed)
    run, summary = open_run(folder), read_json(folder / "summary.json")
    dataset, split, file = run.dataset, run.split, run.model.file
    phi, tau, trained_with = file.phi, file.tau, np.array(file.phi)
    rng = np.random.default_rng((seed, DISTRIBUTIONS.index(distribution)))
    calibration = calibrate(run, rng)
    confusion = calibration.confusion
    temperature = fit_temperature(calibration.logits, calibration.targets) or 1.0

    used = np.concatenate([split.labeled, split.unlabeled])
    counts = np.array(split.unlabeled_counts)
    sets = {"trained": split.unlabeled, "fresh": fresh_rows(dataset.labels, used, counts, rng)}
    lines = []
    for kind, rows in sets.items():
        logits = run.logits(dataset.images, rows)
        truth = np.bincount(dataset.labels[rows], minlength=dataset.num_classes)
        predicted = np.bincount(logits.argmax(axis=1), minlength=dataset.num_classes)
        found = bayesian_shares(confusion, predicted, seed=seed)
        shares = truth / truth.sum()
        covered = (found.low <= shares) & (shares <= found.high)
        sharp = posterior(logits, trained_with, phi=phi, tau=tau)
        tempered = posterior(logits / temperature, trained_with, phi=phi, tau=tau)
        estimates = {
            "bayesian": found.estimate,
            "black_box": black_box_shares(confusion, predicted),
            "em": em_shares(sharp, trained_with).shares,
            "em_temperature": em_shares(tempered, trained_with).shares,
            "mean_posterior": posterior(logits, None, phi=phi, tau=tau).mean(axis=0),
            "pi_u": np.array(file.pi_u),
            "uniform": np.ones(dataset.num_classes),
        }
        lines.append(
            {
                "distribution": distribution,
                "seed": seed,
                "images_of": kind,
                "images": len(rows),
                "calibrated_with": len(calibration.targets),
                "top1": round(summary["top1"], 2),
                "covered": int(covered.sum()),
                "classes": len(covered),
                "mean_width": round(float((found.high - found.low).mean()), 4),
                "chains_agree": found.converged,
                "missed": " ".join(f"{k}:{s:.4f}" for k, s in enumerate(shares) if not covered[k]),
                **{
                    f"kl_{name}": round(kl_divergence(truth.tolist(), list(values)), 4)
                    for name, values in estimates.items()
                },
                "trained_at": file.commit,
                **stamps(),
            }
        )
    return lines


def write_lines(lines: list[dict[str, Any]]) -> None:
    lines.sort(key=lambda r: (KINDS.index(r["images_of"]), _place(r), int(r["seed"])))
    write_csv(RESULTS.name, list(lines[0]), lines)
    write_atomically(RESULTS.with_suffix(".md"), table(lines))


def _place(line: dict[str, Any]) -> int:
    return DISTRIBUTIONS.index(line["distribution"])


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: coverage, widths and the distance of every estimator, means over the seeds."""
    heads = ("images_of", "distribution", "seeds", "covered", "mean width", *ESTIMATORS)
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind in KINDS:
        for distribution in (*DISTRIBUTIONS, "all"):
            part = [
                r
                for r in lines
                if r["images_of"] == kind and distribution in (r["distribution"], "all")
            ]
            if part:
                out.append(_row(kind, distribution, part))
    first = lines[-1]
    return "\n".join(
        [
            *out,
            "",
            f"Covered: class shares inside their 95 % interval, calibrated with "
            f"{first['calibrated_with']} test images ({PER_CLASS} of each class). Mean width: of "
            "the intervals, in points. The rest: KL(true shares || estimate) in nats, mean over "
            "the seeds.",
            "",
            *stamped(lines),
            "",
            "Again: `python bench/shares_coverage.py` (trains what is missing).",
            "",
        ]
    )


def _row(kind: str, distribution: str, part: list[dict[str, Any]]) -> str:
    covered, classes = (sum(int(r[key]) for r in part) for key in ("covered", "classes"))
    width = 100 * np.mean([float(r["mean_width"]) for r in part])
    distances = [np.mean([float(r[f"kl_{name}"]) for r in part]) for name in ESTIMATORS]
    cells = [
        *(kind, distribution, str(len({str(r["seed"]) for r in part}))),
        f"{covered} of {classes} ({100 * covered / classes:.0f} %)",
        f"{width:.1f}",
        *(f"{value:.3f}" for value in distances),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage of the intervals of class shares.")
    parser.add_argument("--only", choices=DISTRIBUTIONS, help="one distribution")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--no-train", action="store_true", help="finished runs only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    distributions = [options.only] if options.only else DISTRIBUTIONS
    for seed, distribution in itertools.product(options.seeds, distributions):
        lines = read_rows(RESULTS.name)
        if any((r["distribution"], r["seed"]) == (distribution, str(seed)) for r in lines):
            continue
        if not options.no_train:
            train(distribution, seed, options.threads)
        elif not (run_folder(distribution, seed) / "summary.json").is_file():
            continue
        found = measure(distribution, seed)
        for line in found:
            print({key: line[key] for key in ("distribution", "seed", "images_of", "covered")})
        write_lines([*lines, *found])
    print(RESULTS.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
