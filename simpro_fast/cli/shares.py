"""`simpro-fast shares`: class shares of unlabeled images."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.answers.class_shares import estimates, images_of, look_at, sample
from simpro_fast.answers.labeled import LabeledLogits, labeled_logits
from simpro_fast.answers.model import load_model
from simpro_fast.answers.predict import Unreadable
from simpro_fast.answers.report.verb_figures import shares_figure
from simpro_fast.answers.sources import Sources
from simpro_fast.answers.unlabeled import unlabeled_set
from simpro_fast.cli.answers import Files, common_flags, conclude, output_files
from simpro_fast.cli.ending import verb
from simpro_fast.cli.parser import CommandParser, positive
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.claimed_files import check_same
from simpro_fast.utils.logs import log_to_terminal
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.printable import printable
from simpro_fast.utils.progress import ProgressBar
from simpro_fast.utils.provenance import library_versions
from simpro_fast.utils.terminal import plain_table, rendered

DESCRIPTION = """\
Estimate the class shares of unlabeled images, with 95 % intervals.

FOLDER is a folder, an image, a pattern, a tar shard, a manifest, or - for a list of paths on
standard input. --calibrate VAL is a folder with one subfolder per class (or a manifest with labels)
of images that were not trained on: they tell what each class is taken for. Without it the counts
that the model brings from its own test set are used, and without those there is no interval, unless
--out-of-fold K asks the labeled images of a run on cached features.

examples:
  simpro-fast shares runs/mine/seed1 photos/unlabeled --calibrate photos/val
  simpro-fast shares runs/mine/seed1 'shards/{000..127}.tar' --sample 100000 --json"""
EPILOG = """\
Writes shares.json and shares.png into --output, over older ones with --overwrite only. The estimate
takes the network's mistakes into account, not its probabilities; EM and the mean posterior, which
trust those, and pi_u of the training stand beside it. All of it assumes that images of a class look
alike in VAL and in FOLDER.

Exit code: 0 all images are counted, 1 some could not be read (0 with --on-bad-image skip) or the
run failed, 2 wrong usage, a folder of VAL that is no class of the model or an output that cannot be
written, 130 interrupted."""
USED_IN_TRAINING = (
    "if the network was trained on these images, labeled or not, it has fitted its own guesses of "
    "them; they are then confused otherwise than those that calibrate, and intervals may miss"
)
_CLASSES_SHOWN = 50
_NOT_A_PATH = {
    "model": "the model's own test",
    "out of fold": "the labeled ones, each by a head that has not seen it",
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("simpro-fast shares", DESCRIPTION, EPILOG)
    parser.add_argument("model", type=Path, metavar="MODEL", help="run directory or its weights")
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="the images, see above")
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--calibrate", type=Path, metavar="VAL", help="images with known classes")
    known.add_argument(
        "--out-of-fold",
        type=positive,
        metavar="K",
        help="calibrate with the labeled images of the run (on cached features), each by a head "
        "that K-fold training has not shown it to",
    )
    parser.add_argument(
        "--sample", type=positive, metavar="N", help="look at N images, drawn evenly (all)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of all draws (1)")
    common_flags(parser)
    return parser.parse(arguments)


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate; returns 0 done, 1 some images could not be read, and as `ending.verb`."""
    options = parse_arguments(arguments)
    with output_files(options, "shares.json", "shares.png") as files:
        return _run(options, files)


def _run(options: argparse.Namespace, files: Files) -> int:
    model = load_model(options.model, options.device, trust_code=options.trust_code)
    sources = Sources(options.folders, None, sys.stdin.buffer)
    shape: dict[str, Any] = {
        "batch_size": options.batch_size,
        "threads": options.threads or cpu_cores(),
    }
    notes: list[str] = []
    confusion, calibration = _known(model.file.confusion), {"from": "model", "images": 0}
    known: LabeledLogits | None = None
    if options.calibrate is not None:
        progress = ProgressBar("calibrated with", "images", shown=not options.quiet)
        known = labeled_logits(model, options.calibrate, **shape, progress=progress)
        progress.close()
        calibration["from"] = str(options.calibrate)
        notes += known.notes
    elif options.out_of_fold:
        known = _out_of_fold(options)
        calibration["from"] = "out of fold"
    if known is not None:
        confusion = known.confusion
    calibration["images"] = 0 if confusion is None else int(confusion.sum())
    items, unseen = iter(sources), 0
    if options.sample:
        chosen, unseen = sample(items, options.sample, options.seed)
        items = iter(chosen)
    progress = ProgressBar("classified", "images", shown=not options.quiet)
    images = look_at(model, items, seed=options.seed, **shape, progress=progress)
    progress.close()
    unreadable = images.unreadable + (Unreadable() if known is None else known.unreadable)
    answer = estimates(model, images, confusion, options.seed, known, unseen)
    document = {
        "model": str(options.model),
        "sources": list(options.folders),
        "bad_images": dict(unreadable.counts),
        "calibration": None if confusion is None else calibration,
        "seed": options.seed,
        **answer,
        "warnings": [*answer["warnings"], *([] if confusion is None else [USED_IN_TRAINING])],
        "versions": {"simpro_fast": version("simpro_fast"), **library_versions()},
    }
    folder: Path = options.output
    check_same(files)
    write_json(folder / "shares.json", document)
    notes += [f"ignored: {line}" for line in sources.ignored.lines()]
    notes.append(f"written: {folder / 'shares.json'}")
    if not options.no_figures:
        shares_figure(document, folder / "shares.png")
        notes.append(f"written: {folder / 'shares.png'}")
    if options.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    elif not options.quiet:
        for line in _lines(document):
            print(line)  # names in it are made fit to be shown
    notes = [*(f"warning: {text}" for text in document["warnings"]), *notes]
    classified = images.images + (0 if known is None else len(known.targets))
    return conclude(options, options.model, notes, unreadable, classified + unreadable.count)


def _out_of_fold(options: argparse.Namespace) -> LabeledLogits:
    """The labeled images of the run, by heads that have not seen them."""
    from simpro_fast.distributed.process_group import start_ranks
    from simpro_fast.training.out_of_fold import out_of_fold_logits

    run = options.model if options.model.is_dir() else options.model.parent
    of = unlabeled_set(run, trust_code=options.trust_code)
    log_to_terminal(not options.quiet)
    logits = out_of_fold_logits(
        of.config, of.dataset, of.split, start_ranks(of.config), options.out_of_fold
    )
    return LabeledLogits(logits, of.dataset.labels[of.split.labeled])


def _known(confusion: tuple[tuple[int, ...], ...] | None) -> np.ndarray | None:
    matrix = None if confusion is None else np.array(confusion, np.int64)
    return matrix if matrix is not None and matrix.any() else None


def _lines(document: dict[str, Any]) -> list[str]:
    rows = sorted(document["rows"], key=lambda row: -row["estimate"])
    titles = {"estimate": "estimate", "low": "95 % interval", "em": "EM"}
    if rows[0]["em_calibrated"] is not None:
        titles = {"em_calibrated": "EM, calibrated", **titles}
    titles |= {"mean_posterior": "mean posterior", "pi_u": "pi_u"}
    table = plain_table(f"share in {images_of(document)}, %", *titles.values())
    for row in rows[:_CLASSES_SHOWN]:
        shown = {key: "none" if row[key] is None else f"{100 * row[key]:.1f}" for key in titles}
        if row["low"] is not None:
            shown["low"] += f" to {100 * row['high']:.1f}"
        table.add_row(printable(row["class"]), *shown.values())
    lines = rendered(table, sys.stdout).splitlines()
    if len(rows) > _CLASSES_SHOWN:
        lines.append(f"(the {_CLASSES_SHOWN} largest of {len(rows)}; shares.json has all)")
    known = document["calibration"]
    if known:
        where = _NOT_A_PATH.get(known["from"], printable(known["from"]))
        lines.append(f"calibrated with {known['images']:,} images of {where}")
    return lines
