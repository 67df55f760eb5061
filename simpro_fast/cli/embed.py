"""`simpro-fast embed`: what a frozen backbone sees of every image, made once."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from simpro_fast.cli.ending import DONE, verb
from simpro_fast.cli.parser import CommandParser, positive
from simpro_fast.utils.errors import ConfigError

DESCRIPTION = """\
Run the backbone of a configuration over all its images once, and keep what it sees of each image
as it is and in weak and strong views. `train` with train.features=DIR then trains the head alone,
thousands of steps in seconds.

examples:
  simpro-fast embed photos.yaml --output features
  simpro-fast train photos.yaml train.features=features
  simpro-fast embed photos.yaml model.name=timm/resnet50 model.weights=resnet50.safetensors \\
      --weak 4 --strong 8 --output features"""
EPILOG = """\
The configuration names data, model.name and model.weights. The folder takes
images x (1 + weak + strong) x D x 2 bytes. docs/finetuning.md has more.

Exit code: 0 done, 1 failed, 2 wrong usage, a wrong configuration or an output that cannot be
written, 130 interrupted."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("simpro-fast embed", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--config", help="YAML file or the name of a shipped one; --config may be left out"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="write the features here"
    )
    parser.add_argument(
        "--weak", type=positive, default=2, metavar="N", help="weak views of each image (2)"
    )
    parser.add_argument(
        "--strong",
        type=positive,
        default=4,
        metavar="N",
        help="strong views of each image, a multiple of --weak (4)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished folder")
    parser.add_overrides()
    options = parser.parse(arguments)
    if options.config is None:
        raise ConfigError("--config is missing; for example digits_lt/reversed")
    return options


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Embed; returns 0 done, and as `ending.verb`."""
    options = parse_arguments(arguments)
    from simpro_fast.config import load_config
    from simpro_fast.data.datasets.registry import load_dataset
    from simpro_fast.distributed.process_group import start_ranks
    from simpro_fast.training.embed import embed
    from simpro_fast.training.setup import resolved_data
    from simpro_fast.utils.logs import log_to_terminal

    config = load_config(options.config, options.overrides)
    log_to_terminal(True)
    ranks = start_ranks(config)
    data, normalised_by, interpolated_by = resolved_data(config)
    dataset = load_dataset(data)
    logger = logging.getLogger("simpro_fast")
    logger.info(
        "%d images: %s; statistics: %s; interpolation: %s",
        len(dataset.images),
        dataset.preprocessing,
        normalised_by,
        interpolated_by,
    )
    started = time.perf_counter()
    found = embed(
        config,
        dataset,
        ranks,
        options.output,
        weak=options.weak,
        strong=options.strong,
        resume=options.resume,
    )
    logger.info(
        "%s: %d features of 1 + %d + %d views of each image in %.0f s; train with "
        "train.features=%s",
        options.output,
        found.features,
        found.weak,
        found.strong,
        time.perf_counter() - started,
        options.output,
    )
    return DONE
