"""Run directories as a training leaves them, of made-up numbers that look like those of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.answers.report.pictures import (
    FOLDER,
    Mistakes,
    TrainingViews,
    save_mistakes,
    save_views,
)

PERIODS, PERIOD = 12, 50


def make_run(
    path: Path,
    *,
    name: str = "toy_lt/reversed",
    seed: int = 1,
    method: str = "simpro",
    class_names: list[str] | None = None,
    num_classes: int = 10,
    level: float = 0.0,
    finished: bool = True,
    shares: bool = False,
    evaluated: bool = False,
    pictures: bool = False,
    labeled_max: int = 150,
    split_seed: int | None = None,
    **config: Any,
) -> Path:
    """Write a run to `path`.

    Args:
        level: percent that all accuracies differ by.
        finished: False leaves out what only the end of a run writes.
        shares: with an estimate that has intervals. evaluated: with confusion and reliability.
        pictures: with views and mistakes.
        config: sections of config.yaml that differ from the shipped ones.
    """
    names = class_names or [f"name{k}" for k in range(num_classes)]
    classes = len(names)
    rng = np.random.default_rng([seed, len(name), classes])
    fall = np.linspace(0, 1, classes)
    labeled = np.maximum(2, labeled_max * (1 / 75) ** fall).astype(int)
    unlabeled = np.maximum(3, 600 * (1 / 75) ** fall[::-1]).astype(int)
    truth = unlabeled / unlabeled.sum()
    final = np.clip(95 - 55 * fall**2 + level + rng.normal(0, 2.5, classes), 2, 99.5)
    rows = [
        _row(rng, p, PERIODS if finished else 2 * PERIODS, final, truth, float(fall.mean()))
        for p in range(1, PERIODS + 1)
    ]
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = PERIODS * PERIOD if finished else 2 * PERIODS * PERIOD
    tree: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "method": {"name": method, "tau": 1.0, "threshold": 0.8},
        "data": {"name": "digits", "labeled_max": labeled_max, "split_seed": split_seed},
        "train": {"steps": steps, "period": PERIOD},
    }
    for section, values in config.items():
        tree.setdefault(section, {}).update(values)
    (path / "config.yaml").write_text(json.dumps(tree))
    counts = {"labeled_counts": labeled.tolist(), "unlabeled_counts": unlabeled.tolist()}
    digest = f"{labeled_max:032x}{split_seed or 0:032x}"
    split = {
        "dataset": "digits",
        "class_names": names,
        "num_labeled": int(labeled.sum()),
        "num_unlabeled": int(unlabeled.sum()),
        "num_test": 40 * classes,
        **counts,
        "test_counts": [40] * classes,
        "overlap": False,
        "hash": digest,
    }
    (path / "split.json").write_text(json.dumps(split))
    environment = {
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
        "machine": "Some(R) Processor, 2 cores",
        "world_size": 1,
        "device": "cpu",
        "data": "d" * 64,
        "split": digest,
    }
    (path / "environment.json").write_text(json.dumps(environment))
    if not finished:
        return path
    last = rows[-1]
    summary = {
        "name": name,
        "seed": seed,
        "method": method,
        "steps": steps,
        **{key: last[key] for key in ("top1", "top1_class_mean", "per_class", "pi_u", "kl_pi_u")},
        "top1_mean_last20": last["top1"] - 1.0,
        "top1_best": last["top1"] + 0.5,
        "many": float(final[: classes // 3].mean()),
        "medium": float(final[classes // 3 : 2 * classes // 3].mean()),
        "few": float(final[2 * classes // 3 :].mean()),
        "class_names": names,
        "pi_u_true": truth.tolist(),
        **counts,
        "seconds": 127.0,
        "images_per_second": last["images_per_second"],
    }
    if evaluated:
        summary |= _evaluated(rng, final / 100)
    if shares:
        summary["shares"] = {
            "method": "bayesian",
            "images": int(unlabeled.sum()),
            "rows": [
                {"class": k, "estimate": s, "low": 0.8 * s, "high": min(1.0, 1.25 * s)}
                for k, s in enumerate(last["pi_u"])
            ],
        }
    (path / "summary.json").write_text(json.dumps(summary))
    if pictures:
        _pictures(rng, path / FOLDER, names)
    return path


def _row(
    rng: np.random.Generator,
    period: int,
    periods: int,
    final: np.ndarray,
    truth: np.ndarray,
    middle: float,
) -> dict[str, Any]:
    done = 1 - np.exp(-4 * period / periods)
    classes = len(final)
    pi_u = truth ** (done**0.5) * np.exp(rng.normal(0, 0.12, classes))
    pi_u /= pi_u.sum()
    tested = period % 2 == 0
    per_class = np.clip(final * done + rng.normal(0, 2, classes), 0, 100)
    mask = np.clip(done * (0.5 + final / 200) + rng.normal(0, 0.03, classes), 0, 1)
    right = np.clip(final * 0.5 + 50 + rng.normal(0, 2, classes), 0, 100)
    unknown = rng.random(classes) < 0.3 * (1 - done)
    return {
        "step": period * PERIOD,
        "period": period,
        "mask_rate": float(mask.mean()),
        "pseudo_label_accuracy": float(right.mean()),
        "mask_rate_per_class": mask.tolist(),
        "pseudo_label_accuracy_per_class": [
            None if lost else float(v) for v, lost in zip(right, unknown, strict=True)
        ],
        "pi_u": pi_u.tolist(),
        "kl_pi_u": float((truth * np.log(truth / pi_u)).sum()),
        "top1": float(per_class.mean()) if tested else None,
        "top1_class_mean": float(per_class.mean()) if tested else None,
        "per_class": per_class.tolist() if tested else None,
        "images_per_second": float(6000 * middle + rng.normal(0, 60)),
        "data_wait_fraction": float(abs(rng.normal(0.03, 0.01))),
    }


def _evaluated(rng: np.random.Generator, recall: np.ndarray) -> dict[str, Any]:
    classes = len(recall)
    others = rng.dirichlet(np.full(classes, 0.3), classes)
    np.fill_diagonal(others, 0)
    rates = others / others.sum(axis=1, keepdims=True) * (1 - recall)[:, None]
    np.fill_diagonal(rates, recall)
    bins = [
        {"confidence": c, "accuracy": max(0.0, c - 0.12 * c**2), "count": int(20 + 300 * c**3)}
        for c in np.linspace(0.2, 0.98, 12)
    ]
    empty = {"confidence": None, "accuracy": None, "count": 0}
    return {
        "confusion": np.rint(40 * rates).astype(int).tolist(),
        "reliability": {"bins": [empty, *bins]},
        "ece": 0.071,
        "temperature": 1.42,
        "log_likelihood": -0.83,
    }


def _pictures(rng: np.random.Generator, folder: Path, names: list[str]) -> None:
    images = rng.integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
    titles = [names[k % len(names)] for k in range(6)]
    captions = [["rotate 3, solarize 2", "cutout only"]] * 6
    save_views(TrainingViews(images, images, np.stack([images] * 2, 1), titles, captions), folder)
    labels = np.arange(6) % len(names)
    predicted = (labels + 1) % len(names)
    save_mistakes(Mistakes(images, labels, predicted, np.linspace(0.99, 0.6, 6)), folder)
