"""`simpro-fast evaluate`: how good a trained network is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpro_fast.answers.assess import assess
from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.labeled import labeled_logits, run_test_logits
from simpro_fast.answers.model import load_model
from simpro_fast.answers.prior_file import chosen_prior
from simpro_fast.answers.report.verb_figures import confusion_figure, reliability_figure
from simpro_fast.cli.answers import Files, common_flags, conclude, output_files
from simpro_fast.cli.ending import verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.utils.atomic_write import finite, write_json
from simpro_fast.utils.claimed_files import check_same
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.printable import printable
from simpro_fast.utils.progress import ProgressBar
from simpro_fast.utils.provenance import library_versions
from simpro_fast.utils.terminal import plain_table, rendered

DESCRIPTION = """\
Accuracy, calibration and confusion of a trained network on images whose classes are known.

DATA is a folder with one subfolder per class, or a manifest (.csv or .parquet with the columns
path and label; of its rows those of the splits val and test, if it has any). Without it, or with
--run-test, the test set of the run itself.

examples:
  simpro-fast evaluate runs/mine/seed1
  simpro-fast evaluate runs/mine/seed1 photos/val --prior uniform
  simpro-fast evaluate model.safetensors photos/val --json --output results"""
EPILOG = """\
Writes evaluation.json, confusion.png and reliability.png into --output, over older ones
with --overwrite only. A class without images has null there and - in the table. docs/answers.md
explains all of it.

Exit code: 0 all images are evaluated, 1 some could not be read (0 with --on-bad-image skip) or the
run failed, 2 wrong usage, a folder that is no class of the model or an output that cannot be
written, 130 interrupted."""
_CLASSES_SHOWN = 50


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("simpro-fast evaluate", DESCRIPTION, EPILOG)
    parser.add_argument("model", type=Path, metavar="MODEL", help="run directory or its weights")
    parser.add_argument("data", type=Path, metavar="DATA", nargs="?", help="see above")
    parser.add_argument("--run-test", action="store_true", help="the test set of the run")
    parser.add_argument(
        "--prior",
        default="none",
        metavar="P",
        help="class distribution to answer under, shown beside none: uniform, labeled, estimated "
        "(the training's pi_u), or a file, JSON {class: share} or CSV class,share",
    )
    common_flags(parser)
    options = parser.parse(arguments)
    if options.run_test and options.data is not None:
        raise ConfigError("give DATA or --run-test, not both")
    return options


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; returns 0 done, 1 some images could not be read, and as `ending.verb`."""
    options = parse_arguments(arguments)
    with output_files(options, "evaluation.json", "reliability.png", "confusion.png") as files:
        return _run(options, files)


def _run(options: argparse.Namespace, files: Files) -> int:
    model = load_model(options.model, options.device, trust_code=options.trust_code)
    prior = chosen_prior(options.prior, model.class_names)
    progress = ProgressBar("evaluated", "images", shown=not options.quiet)
    shape: dict[str, Any] = {
        "batch_size": options.batch_size,
        "threads": options.threads or cpu_cores(),
        "progress": progress,
    }
    if options.data is None:
        found = run_test_logits(model, options.model, **shape, trust_code=options.trust_code)
    else:
        found = labeled_logits(model, options.data, **shape)
    progress.close()
    priors = {"none": assess(model, found, "none")}
    if prior != "none":
        priors[options.prior] = assess(model, found, prior)
    document = {
        "model": str(options.model),
        "data": "the run's test set" if options.data is None else str(options.data),
        "images": len(found.targets),
        "bad_images": dict(found.unreadable.counts),
        "class_names": list(model.class_names),
        "priors": priors,
        "versions": library_versions(),
    }
    folder: Path = options.output
    check_same(files)
    write_json(folder / "evaluation.json", document)
    written = ["evaluation.json"]
    if not options.no_figures:
        reliability_figure(priors, folder / "reliability.png")
        written.append("reliability.png")
        if (matrix := priors["none"]["confusion"]) is not None:
            confusion_figure(matrix, model.class_names, folder / "confusion.png")
            written.append("confusion.png")
    if options.json:
        print(json.dumps(finite(document), indent=1, allow_nan=False))
    elif not options.quiet:
        for line in _lines(document):
            print(line)  # names in it are made fit to be shown
    chance = chance_warning(priors["none"]["confusion"])
    notes = [f"warning: {chance}"] if chance else []
    notes += [*found.notes, *(f"written: {folder / name}" for name in written)]
    images = len(found.targets) + found.unreadable.count
    return conclude(options, options.model, notes, found.unreadable, images)


def _lines(document: dict[str, Any]) -> list[str]:
    """The tables that are printed."""
    priors = document["priors"]
    first = next(iter(priors.values()))
    table = plain_table(f"{document['images']:,} images", *(f"prior {p}" for p in priors))
    for title, cell in (
        ("top-1 %", lambda r: _interval(r["top1"])),
        (f"top-{first['top_k']} %", lambda r: _interval(r["top_k_accuracy"])),
        ("mean over classes %", lambda r: _interval(r["class_mean"])),
        ("  many (> 100 labeled)", lambda r: _number(r["many"])),
        ("  medium", lambda r: _number(r["medium"])),
        ("  few (< 20 labeled)", lambda r: _number(r["few"])),
        ("log-likelihood", lambda r: _number(r["log_likelihood"], 3)),
        ("calibration error %", lambda r: _number(100 * r["ece"])),
        ("temperature", lambda r: _number(r["temperature"], 2)),
    ):
        table.add_row(title, *(cell(result) for result in priors.values()))
    classes = plain_table("class, accuracy %", "images", *(f"prior {p}" for p in priors))
    shown = list(range(len(first["per_class"])))
    if cut := len(shown) > _CLASSES_SHOWN:
        known = [k for k in shown if first["per_class"][k]["accuracy"] is not None]
        shown = sorted(known, key=lambda k: first["per_class"][k]["accuracy"])[:_CLASSES_SHOWN]
    for k in shown:
        row = first["per_class"][k]
        cells = [r["per_class"][k] for r in priors.values()]
        values = [_interval({**c, "value": c["accuracy"]}) for c in cells]
        classes.add_row(printable(row["class"]), f"{row['images']:,}", *values)
    lines = [*rendered(table, sys.stdout).splitlines(), ""]
    lines += rendered(classes, sys.stdout).splitlines()
    if cut:
        lines.append(f"(the {len(shown)} worst classes; evaluation.json has all)")
    lines.append("in brackets: 95 % intervals (Wilson)")
    return lines


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(found: dict[str, float | None]) -> str:
    if found["value"] is None:
        return "-"
    return f"{found['value']:.1f} [{found['low']:.1f}, {found['high']:.1f}]"
