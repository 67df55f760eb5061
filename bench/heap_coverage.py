"""Do the intervals of `simpro-fast heap` cover the truth? Five distributions, three seeds.

    python bench/heap_coverage.py                      # trains what is missing, then estimates
    python bench/heap_coverage.py --only reversed --seeds 1
    python bench/heap_coverage.py --no-train           # of the runs that are finished

Every run is configs/fashion_mnist_lt/<distribution> as it stands (600 steps of a small network on
the CPU, four to five minutes of one core). Of each, two heaps are estimated:

    trained  the unlabeled set that the run was trained on
    fresh    other images of the same class distribution, neither trained on nor calibrated with

Both are calibrated with 100 images of each class of the test part, drawn by the seed; the rest of
the test part is not used. Results are in bench/results/heap_coverage.csv (a line per run and heap)
and .md (table). Finished runs and lines are not made again.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from simpro_fast.config import load_config
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.split import load_split
from simpro_fast.estimation.bayesian import bayesian_shares
from simpro_fast.estimation.calibration import fit_temperature
from simpro_fast.estimation.posterior import posterior
from simpro_fast.estimation.shares import black_box_shares, em_shares
from simpro_fast.evaluation import kl_divergence, network_input
from simpro_fast.models import build_model
from simpro_fast.utils.atomic_write import read_json, write_atomically
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "heap_coverage"
DISTRIBUTIONS = ("consistent", "uniform", "reversed", "middle", "head_tail")
HEAPS = ("trained", "fresh")
PER_CLASS = 100
ESTIMATORS = ("bayesian", "black_box", "em", "em_temperature", "mean_posterior", "pi_u", "uniform")


def run_folder(distribution: str, seed: int) -> Path:
    return ROOT / "runs" / "heap_coverage" / distribution / f"seed{seed}"


def train(distribution: str, seed: int, threads: int) -> None:
    """One run, unless it is finished; an interrupted one goes on."""
    if (run_folder(distribution, seed) / "summary.json").is_file():
        return
    command = [
        *(sys.executable, "launch/train.py"),
        *("--config", f"configs/fashion_mnist_lt/{distribution}.yaml"),
        *(f"name=heap_coverage/{distribution}", f"seed={seed}"),
        *("log.progress=off", "log.figures=false"),
        *(f"train.threads={threads}", f"train.data_threads={threads}"),
    ]
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


@torch.inference_mode()
def logits_of(
    network: torch.nn.Module, images: np.ndarray, dataset_rows: np.ndarray, mean: Any, std: Any
) -> np.ndarray:
    """float32 [n, K] of some images."""
    parts = []
    for rows in np.array_split(dataset_rows, max(1, len(dataset_rows) // 500)):
        pixels = torch.as_tensor(images[rows])
        parts.append(network(network_input(pixels, mean, std, torch.float32)).numpy())
    return np.concatenate(parts)


def fresh_rows(labels: np.ndarray, used: np.ndarray, counts: np.ndarray, rng: Any) -> np.ndarray:
    """Unused images in the class proportions of `counts`, as many as there are."""
    free = [np.setdiff1d(np.flatnonzero(labels == k), used) for k in range(len(counts))]
    scale = min(1.0, min(len(f) / n for f, n in zip(free, counts, strict=True) if n))
    chosen = [
        rng.choice(f, round(scale * n), replace=False) for f, n in zip(free, counts, strict=True)
    ]
    return np.concatenate(chosen)


def measure(distribution: str, seed: int) -> list[dict[str, Any]]:
    """A line for each of the two heaps of a run."""
    folder = run_folder(distribution, seed)
    config = load_config(ROOT / "configs" / "fashion_mnist_lt" / f"{distribution}.yaml")
    dataset, split = load_dataset(config.data), load_split(folder)
    described, summary = read_json(folder / "model.json"), read_json(folder / "summary.json")
    phi, pi_u, tau = described["phi"], described["pi_u"], described["tau"]
    network = build_model(config.model, dataset.num_classes, dataset.image_size, seed=0).eval()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    rng = np.random.default_rng((seed, DISTRIBUTIONS.index(distribution)))
    look = {"mean": dataset.mean, "std": dataset.std}

    test_images, test_labels = dataset.test_part
    classes = range(dataset.num_classes)
    drawn = [rng.choice(np.flatnonzero(test_labels == k), PER_CLASS, False) for k in classes]
    validation = np.concatenate(drawn)
    logits, targets = logits_of(network, test_images, validation, **look), test_labels[validation]
    cells = targets * dataset.num_classes + logits.argmax(axis=1)
    confusion = np.bincount(cells, minlength=dataset.num_classes**2)
    confusion = confusion.reshape(dataset.num_classes, -1)
    temperature = fit_temperature(logits, targets) or 1.0

    used = np.concatenate([split.labeled, split.unlabeled])
    counts = np.array(split.unlabeled_counts)
    heaps = {"trained": split.unlabeled, "fresh": fresh_rows(dataset.labels, used, counts, rng)}
    lines = []
    for kind, rows in heaps.items():
        logits = logits_of(network, dataset.images, rows, **look)
        truth = np.bincount(dataset.labels[rows], minlength=dataset.num_classes)
        predicted = np.bincount(logits.argmax(axis=1), minlength=dataset.num_classes)
        found = bayesian_shares(confusion, predicted, seed=seed)
        shares = truth / truth.sum()
        covered = (found.low <= shares) & (shares <= found.high)
        sharp = posterior(logits, np.array(phi), phi=phi, tau=tau)
        tempered = posterior(logits / temperature, np.array(phi), phi=phi, tau=tau)
        estimates = {
            "bayesian": found.estimate,
            "black_box": black_box_shares(confusion, predicted),
            "em": em_shares(sharp, np.array(phi)).shares,
            "em_temperature": em_shares(tempered, np.array(phi)).shares,
            "mean_posterior": posterior(logits, None, phi=phi, tau=tau).mean(axis=0),
            "pi_u": np.array(pi_u),
            "uniform": np.ones(dataset.num_classes),
        }
        lines.append(
            {
                "distribution": distribution,
                "seed": seed,
                "heap": kind,
                "images": len(rows),
                "calibrated_with": len(validation),
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
                "trained_at": described["commit"],
                "commit": git_commit(),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "machine": machine_name(),
            }
        )
    return lines


def read_lines() -> list[dict[str, Any]]:
    path = RESULTS.with_suffix(".csv")
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_lines(lines: list[dict[str, Any]]) -> None:
    lines.sort(key=lambda r: (HEAPS.index(r["heap"]), _place(r), int(r["seed"])))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(RESULTS.with_suffix(".csv"), text.getvalue())
    write_atomically(RESULTS.with_suffix(".md"), table(lines))


def _place(line: dict[str, Any]) -> int:
    return DISTRIBUTIONS.index(line["distribution"])


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: coverage, widths and the distance of every estimator, means over the seeds."""
    heads = ("heap", "distribution", "seeds", "covered", "mean width", *ESTIMATORS)
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind in HEAPS:
        for distribution in (*DISTRIBUTIONS, "all"):
            part = [
                r for r in lines if r["heap"] == kind and distribution in (r["distribution"], "all")
            ]
            if part:
                out.append(_row(kind, distribution, part))
    first = lines[-1]
    stamps = ("machine", "torch", "numpy", "commit", "trained_at")
    stamped = [sorted({str(r[key]) for r in lines}) for key in stamps]
    return "\n".join(
        [
            *out,
            "",
            f"Covered: class shares inside their 95 % interval, calibrated with "
            f"{first['calibrated_with']} test images ({PER_CLASS} of each class). Mean width: of "
            "the intervals, in points. The rest: KL(true shares || estimate) in nats, mean over "
            "the seeds.",
            "",
            *(f"{key}: {', '.join(values)}  " for key, values in zip(stamps, stamped, strict=True)),
            "",
            "Again: `python bench/heap_coverage.py` (trains what is missing).",
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
        lines = read_lines()
        if any((r["distribution"], r["seed"]) == (distribution, str(seed)) for r in lines):
            continue
        if not options.no_train:
            train(distribution, seed, options.threads)
        elif not (run_folder(distribution, seed) / "summary.json").is_file():
            continue
        found = measure(distribution, seed)
        for line in found:
            print({key: line[key] for key in ("distribution", "seed", "heap", "covered")})
        write_lines([*lines, *found])
    print(RESULTS.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
