"""`predict RUN --out-of-fold K`: the labeled images, by heads that have not seen them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from simpro_fast.answers.model_file import DESCRIPTION, read_model_file
from simpro_fast.answers.outputs import Outputs
from simpro_fast.answers.unlabeled import UnlabeledSet, unlabeled_set
from simpro_fast.answers.writers import Array, Columns, Format, table_format
from simpro_fast.cli.ending import DONE
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.training.out_of_fold import out_of_fold_logits
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.logs import log_to_terminal
from simpro_fast.utils.printable import show

KINDS = {
    "row": "integer",
    "path": "text",
    "label": "text",
    "class": "text",
    "probability": "number",
    "label_probability": "number",
}


def predict_out_of_fold(options: Namespace) -> int:
    """Train a head per fold and write the table, one row per labeled image."""
    output: Path | None = options.output
    if output is None:
        raise ConfigError("--out-of-fold needs --output FILE")
    of = unlabeled_set(Path(options.model), trust_code=options.trust_code)
    files: dict[Path, Format] = {output: table_format(output, KINDS)}
    if options.logits:
        files[options.logits] = Array(len(read_model_file(Path(options.model) / DESCRIPTION).phi))
    log_to_terminal(not options.quiet)
    with Outputs(files, None, overwrite=options.overwrite) as outputs:
        ranks = start_ranks(of.config)
        logits = out_of_fold_logits(of.config, of.dataset, of.split, ranks, options.out_of_fold)
        columns = _columns(of, logits)
        outputs.append(columns, {})
        outputs.finish()
    right = 100 * np.mean([a == b for a, b in zip(columns["label"], columns["class"], strict=True)])
    show(f"{len(columns['row']):,} labeled images, {right:.1f} % predicted as labeled: {output}")
    return DONE


def _columns(of: UnlabeledSet, logits: np.ndarray) -> Columns:
    rows, names = of.split.labeled, of.dataset.class_names
    labels = of.dataset.labels[rows]
    probabilities = torch.from_numpy(logits).double().softmax(1).numpy()
    found = probabilities.argmax(1)
    paths: list[str | None] = [None] * len(labels)
    if (listed := of.listed) is not None:
        paths = [str(listed[i].image) for i in rows]
    every = np.arange(len(labels))
    return {
        "row": rows,
        "path": paths,
        "label": [names[k] for k in labels],
        "class": [names[k] for k in found],
        "probability": probabilities[every, found].astype(np.float32),
        "label_probability": probabilities[every, labels].astype(np.float32),
        "logits": logits,
    }
