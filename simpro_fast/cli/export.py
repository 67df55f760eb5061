"""`simpro-fast export`: a trained network for other programs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.hub_folder import read_card, write_hub_folder
from simpro_fast.answers.model import load_model
from simpro_fast.answers.onnx_file import check_onnx_packages, write_onnx
from simpro_fast.cli.ending import DONE, verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.utils.atomic_write import check_output
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.printable import show

DESCRIPTION = """\
Write a trained network for other programs.

examples:
  simpro-fast export runs/mine/seed1 --onnx mine.onnx
  simpro-fast export runs/mine/seed1 --hub mine-model

--onnx writes one file with the weights inside. Input: images, uint8 [n, S, S, 3] (RGB, any n,
normalised inside); outputs: logits and probabilities, float32 [n, K]. Class names and image size
are in its metadata. The file is run through ONNX Runtime and compared with PyTorch before it is
kept.

--hub writes a folder with model.safetensors, model.json, config.json and README.md, the model card
of the run. Nothing is uploaded; simpro_fast.load_model reads the folder."""
EPILOG = """\
docs/export.md shows how to use both elsewhere.

Exit code: 0 done, 1 failed, 2 wrong usage or an output that cannot be written, 130 interrupted."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("simpro-fast export", DESCRIPTION, EPILOG)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="run directory, its model.safetensors, or a folder of --hub",
    )
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="write this ONNX file")
    parser.add_argument("--hub", type=Path, metavar="DIR", help="write this folder for a model hub")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_common("json", "quiet", "trust_code")
    options = parser.parse(arguments)
    if not (options.onnx or options.hub):
        raise ConfigError("nothing to write; give --onnx FILE, --hub DIR or both")
    return options


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Export; returns 0 done, and as `ending.verb`."""
    options = parse_arguments(arguments)
    given = Path(options.model)
    model = load_model(given, "cpu", trust_code=options.trust_code)
    written: dict[str, Any] = {}
    card = ""
    if options.onnx:
        check_onnx_packages()
        _check_target(options.onnx, options.overwrite, folder=False)
    if options.hub:
        card = read_card(given if given.is_dir() else given.parent)
        _check_target(options.hub, options.overwrite, folder=True)
    if options.onnx:
        difference = write_onnx(model, options.onnx)
        written |= {"onnx": str(options.onnx), "largest_difference": difference}
        if not options.quiet and not options.json:
            size = options.onnx.stat().st_size / 2**20
            show(f"{options.onnx}: {size:.1f} MiB; logits within {difference:.1g} of PyTorch's")
    if options.hub:
        files = write_hub_folder(model, card, options.hub)
        written["hub"] = [str(path) for path in files]
        if not options.quiet and not options.json:
            show(f"{options.hub}: {', '.join(path.name for path in files)}")
    if not options.quiet and (chance := chance_warning(model.file.confusion)):
        show(f"warning: {chance}", file=sys.stderr)
    if options.json:
        print(json.dumps(written, indent=1))
    return DONE


def _check_target(path: Path, overwrite: bool, *, folder: bool) -> None:
    """Before the work: what is there may be replaced, and the place can be written.

    Raises:
        UserError: saying why not.
    """
    check_output(path, folder=folder)
    taken = any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
    if taken and not overwrite:
        raise UserError(f"{path}: exists already; give another name, or --overwrite to replace it")
