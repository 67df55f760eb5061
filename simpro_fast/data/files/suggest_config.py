"""A runnable configuration for a user's own images, from what was counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from simpro_fast.config.data import DataConfig
from simpro_fast.data.files.manifest import Manifest

_SIZES = (32, 64)  # what a wide residual network of stride-1 stem trains on in reasonable time
_PASSES = 100
_SHORT = 5_000
_CPU_BATCH, _CPU_STEPS = 16, 1_000


def suggest_config(
    name: str,
    manifest: Manifest,
    path: Path,
    data: DataConfig,
    packed: Path | None,
    size: int | None,
) -> bytes:
    """YAML for `simpro-fast train`, in UTF-8.

    Args:
        name: of the run, but for what that may not hold.
        manifest: usable rows. path: its file.
        data: what `prepare` was asked for; of it fit, interpolation and on_bad_image stay.
        packed, size: the array made of it and its side, if there is one.
    """
    labeled = [row.label for row in manifest.rows if row.split == "labeled"]
    unlabeled = sum(row.split == "unlabeled" for row in manifest.rows)
    evaluated = any(row.split in ("val", "test") for row in manifest.rows)
    occurring = Counter(labeled)
    counts = [occurring[name] for name in manifest.class_names]
    shorter = median(min(row.width, row.height) for row in manifest.rows)
    size = size or max([s for s in _SIZES if s <= shorter], default=_SIZES[0])
    batch = max(8, min(64, 1 << (len(labeled).bit_length() - 1)))
    mu = max(1, min(8, round(unlabeled / len(labeled))))
    steps = max(1_000, min(43_000, round(_PASSES * unlabeled / (mu * batch), -2)))
    short = steps < _SHORT
    tau = 1.0 if short else 2.0
    name = _safe(name)
    small = f"name={name}_cpu model.name=small_cnn data.batch_size={min(batch, _CPU_BATCH)}"
    lines = [
        f"# {len(labeled)} labeled images of {len(counts)} classes ({_spread(counts)} each), "
        f"{unlabeled} unlabeled ones;",
        f"# median of the shorter sides {shorter:g} px. A starting point, made by prepare.",
        f"# Made for a GPU; how long its {steps} steps take on this machine is said by",
        "# simpro-fast train --config THIS_FILE --dry-run. To try it on a CPU, append to",
        f"# the command: {small} train.steps={min(steps, _CPU_STEPS)}",
        "# which is a run of its own name, and does not stand in the way of this one.",
        f"name: {name}",
        "methods:  # keys of one method: another method.name on the command line has others",
        f"  simpro: {{tau: {tau}}}",
        f"  simpro_star: {{tau: {tau}}}",
        "method:",
        f"  threshold: {0.8 if short else 0.95}  # short runs are less sure of themselves",
        "  alpha_max: 1.0",
        "data:",
        "  name: images",
        f"  manifest: {json.dumps(str(path.resolve()), ensure_ascii=False)}",
    ]
    if packed is not None:
        lines.append(f"  packed: {json.dumps(str(packed.resolve()), ensure_ascii=False)}")
    lines += [
        f"  image_size: {size}",
        f"  fit: {data.fit}  # crop: the largest centred square; pad: the whole picture, with bars",
        *([f"  interpolation: {data.interpolation}"] if data.interpolation else []),
        *(["  on_bad_image: skip  # as prepare was told"] if data.on_bad_image == "skip" else []),
        "  flip: true  # false for text, digits, left/right",
        f"  batch_size: {batch}",
        f"  mu: {mu}",
    ]
    if not evaluated:
        held = min(20, min(counts) // 5)
        note = "no val images: this many labeled ones of each class are kept for testing"
        if not held:
            note = "no val images and too few labeled ones to keep some: nothing is measured"
        lines.append(f"  holdout_per_class: {held}  # {note}")
    lines += [
        "model:",
        "  name: wrn_28_2",
        f"  bn_momentum: {0.01 if short else 0.001}",
        "optim:",
        "  lr: 0.03",
        f"  schedule: {'cosine' if short else 'cosine_7_16'}",
        "train:",
        f"  steps: {steps}  # about {steps * mu * batch / unlabeled:.0f} passes over the unlabeled",
        f"  period: {max(10, min(500, steps // 50))}",
        f"  ema_decay: {0.99 if short else 0.999}",
        f"  ema_warmup: {'true' if short else 'false'}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _spread(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _safe(name: str) -> str:
    """What a run's name may hold of `name`."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return kept.strip(".") or "own"
