"""`simpro-fast prepare`: check a data set before training on it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpro_fast.cli.ending import DONE, verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.config import load_config
from simpro_fast.config.schema import DataConfig
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.image_list import MEAN
from simpro_fast.data.datasets.imagenet import IMAGENET, list_tree
from simpro_fast.data.files.added_labels import Labeled, with_labels
from simpro_fast.data.files.check import CACHE_NAME, check_images, nothing_to_learn_from
from simpro_fast.data.files.decode import MEGAPIXELS, OK
from simpro_fast.data.files.manifest import Manifest, read_manifest, write_manifest
from simpro_fast.data.files.packed import is_packed, pack, packed_path
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.data.files.suggest_config import suggest_config
from simpro_fast.data.files.summary import report, summary_lines
from simpro_fast.data.pipeline.file_graph import GraphDecoder
from simpro_fast.training.setup import resolved_data
from simpro_fast.utils.atomic_write import check_output, replacing
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.file_lock import locked
from simpro_fast.utils.logs import log_to_terminal
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.printable import show
from simpro_fast.utils.progress import ProgressBar

_OWN_ONLY = "--pack, --init-config and --add-labels are for own images (data.name=images)"

DESCRIPTION = """\
Count classes and images, decode every file once, list what is damaged, unsupported or duplicate,
and write a manifest to train from.

examples:
  simpro-fast prepare --labeled photos/labeled --unlabeled photos/unlabeled --val photos/val \\
      --output photos/prepared --init-config photos.yaml
  simpro-fast prepare --labeled 'shards/{000..009}.tar' --unlabeled more --output prepared --pack 64
  simpro-fast prepare --add-labels queue.csv --output photos/prepared
  simpro-fast prepare --config imagenet_127/224 data.root=/data/imagenet --output prepared"""
EPILOG = """\
docs/own_data.md says which files are read, and what the manifest holds.

Exit code: 0 done, 1 files are damaged or doubtful (0 with --on-bad-image skip), 2 wrong usage or
an output that cannot be written, 130 interrupted; the next call goes on."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        "simpro-fast prepare",
        DESCRIPTION,
        EPILOG,
    )
    parser.add_argument("--config", help="take the data set from this configuration")
    parser.add_argument(
        "--labeled", type=Path, help="folder with one subfolder per class, or tar shards"
    )
    parser.add_argument(
        "--unlabeled",
        type=Path,
        nargs="+",
        action="extend",
        help="folders, flat or nested, or tar shards",
    )
    parser.add_argument("--val", type=Path, help="folder like --labeled, to test on")
    parser.add_argument(
        "--add-labels",
        type=Path,
        metavar="FILE",
        help="table path,member,label: unlabeled images of the list join the labeled ones; alone "
        "it changes the manifest in --output",
    )
    parser.add_argument(
        "--new-classes", action="store_true", help="--add-labels may name classes of its own"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--on-bad-image",
        choices=("error", "skip"),
        help="skip: leave unusable files out and go on (default: error, exit code 1)",
    )
    parser.add_argument(
        "--pack",
        type=_positive,
        metavar="PX",
        help="also write one array of PX x PX images, with --config by its data.fit and "
        "data.interpolation",
    )
    parser.add_argument(
        "--init-config",
        type=Path,
        metavar="FILE",
        help="also write a configuration to train with; the run has the name of the file",
    )
    parser.add_argument(
        "--format", choices=("csv", "parquet"), default="csv", help="format of the manifest"
    )
    parser.add_argument(
        "--max-megapixels",
        type=_positive,
        metavar="N",
        help=f"largest picture that is decoded (default: {MEGAPIXELS}); as data.max_megapixels",
    )
    parser.add_argument("--threads", type=_positive, default=cpu_cores(), help="default: all cores")
    parser.add_overrides("change keys of --config")
    return parser.parse(arguments)


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 done, 1 something is wrong, and as `ending.verb`."""
    options = parse_arguments(arguments)
    log_to_terminal(True)
    try:
        data = _data(options)
        if data is None or data.name == "images" or data.name in IMAGENET:
            return _prepare_images(options, data)
        raise ConfigError(f"{data.name} needs no preparation: training reads and checks its files")
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run the same command again to continue") from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _data(options: argparse.Namespace) -> DataConfig | None:
    """The configured data set; None where the folders are on the command line."""
    folders = options.labeled or options.unlabeled or options.val
    if options.new_classes and not options.add_labels:
        raise ConfigError("--new-classes is for the labels of --add-labels")
    if options.config:
        if folders:
            raise ConfigError("--config and --labeled/--unlabeled/--val exclude each other")
        config = load_config(options.config, options.overrides)
        return resolved_data(config)[0] if options.pack else config.data
    if options.overrides:
        first = options.overrides[0]
        if "=" not in first:
            raise ConfigError(
                f"{first} is one too many: --labeled and --val take one folder, shard or pattern; "
                "quote patterns ('train-{000..009}.tar')"
            )
        raise ConfigError(f"{first} needs --config")
    alone = options.add_labels and not folders  # to the list in --output
    if not alone and not (options.labeled and options.unlabeled):
        raise ConfigError("give --labeled and --unlabeled, or --config")
    return None


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """One process at a time per output folder; the next finds everything done."""
    check_output(output, folder=True)
    with locked(output / ".prepare.lock", "choose another --output"):
        yield


def _prepare_images(options: argparse.Namespace, data: DataConfig | None) -> int:
    started = time.perf_counter()
    published = data is not None and data.name in IMAGENET
    if published and (options.pack or options.init_config or options.add_labels):
        raise ConfigError(_OWN_ONLY)
    if options.init_config:
        check_output(options.init_config)
    manifest, ignored = _list(options, data)  # before the folder for the results is made
    with _alone(options.output):
        labeled = Labeled(manifest, (), None)
        if not published:
            labeled = with_labels(
                manifest, options.output, options.add_labels, new_classes=options.new_classes
            )
        # What a list that was written before has left out.
        left_out = {(row.path, row.member) for row in manifest.rows if row.status != OK}
        return _write_images(options, data, labeled, ignored, started, left_out)


def _manifest_path(options: argparse.Namespace) -> Path:
    return Path(options.output / f"manifest.{options.format}")


def _write_images(
    options: argparse.Namespace,
    data: DataConfig | None,
    labeled: Labeled,
    ignored: Ignored,
    started: float,
    left_out: set[tuple[str, str]],
) -> int:
    published, manifest = data is not None and data.name in IMAGENET, labeled.manifest
    progress = ProgressBar("decoded")
    checked = check_images(
        manifest,
        options.output / CACHE_NAME,
        threads=options.threads,
        progress=progress,
        new_decoder=GraphDecoder,
        compare=not published,
        megapixels=options.max_megapixels or (data.max_megapixels if data else MEGAPIXELS),
        packing=bool(options.pack),
    )
    progress.close()
    problems = checked.problems()
    asked = data or DataConfig()
    asked = asked.model_copy(update={"on_bad_image": options.on_bad_image or asked.on_bad_image})
    for line in summary_lines(checked, ignored, sys.stdout, asked.fit):
        print(line)
    _write_json(options.output / "report.json", report(checked, ignored))
    nothing = nothing_to_learn_from(checked)
    refused = [row for row in problems if (row.path, row.member) not in left_out]
    if refused and asked.on_bad_image == "error":
        raise UserError(
            f"{len(refused)} of {len(manifest.rows)} files cannot be used (listed above, all in "
            f"{options.output / 'report.json'}), no manifest was written; repair or remove them, "
            "or use --on-bad-image skip" + (f". Besides, {nothing}" if nothing else "")
        )
    if nothing:
        raise UserError(nothing)
    path = _manifest_path(options)
    for line in labeled.lines:
        show(line)
    labeled.keep(options.output)
    written = Manifest(options.output.resolve(), checked.manifest.rows, manifest.class_names)
    write_manifest(written, path)
    skipped = f", {len(problems)} skipped" if problems else ""
    show(f"manifest {path}{skipped}")
    if not published:  # there the numbers of the classes count, too
        show(
            f"fingerprint {written.usable().fingerprint()[:12]} of the list "
            "(training shows it as `data`; a run resumes only with the same)"
        )
    packed = _pack(options, written, asked) if options.pack else None
    if options.init_config and os.path.lexists(options.init_config):
        show(f"configuration {options.init_config} exists already, and is left as it is")
    elif options.init_config:
        with replacing(options.init_config) as file:
            name, usable = options.init_config.stem, written.usable()
            file.write(suggest_config(name, usable, path, asked, packed, options.pack))
        show(f"configuration {options.init_config} for a GPU; its comments explain CPU use")
    seconds = time.perf_counter() - started
    known = len(manifest.rows) - checked.decoded
    files = "1 file" if checked.decoded == 1 else f"{checked.decoded} files"
    show(f"{files} decoded, {known} known from before, {seconds:.1f} s")
    return DONE


def _list(options: argparse.Namespace, data: DataConfig | None) -> tuple[Manifest, Ignored]:
    if data is None and options.labeled is None:
        return read_manifest(_manifest_path(options)), Ignored()
    if data is None:
        return scan_folders(options.labeled, options.unlabeled, options.val)
    if data.manifest is not None:
        return read_manifest(data.manifest), Ignored()
    if data.name in IMAGENET:
        return list_tree(data)
    assert data.labeled is not None  # checked by the configuration
    return scan_folders(data.labeled, data.unlabeled, data.val)


def _pack(options: argparse.Namespace, manifest: Manifest, data: DataConfig) -> Path:
    path = packed_path(options.output, options.pack)
    square = Square.configured(data, options.pack, MEAN)
    if is_packed(manifest, options.output, square):
        show(f"packed {path}, up to date")
        return path
    total = len(manifest.usable().rows)
    progress = ProgressBar("packed")
    pack(
        manifest,
        options.output,
        square,
        threads=options.threads,
        progress=lambda done: progress(done, total),
    )
    progress.close()
    how = f"data.fit={square.fit}, {square.interpolation}"
    show(f"packed {path}, {total} images of {options.pack} px ({how})")
    return path


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
