"""`simpro-fast predict`: classify images by a trained network."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.model import TrainedModel, load_model
from simpro_fast.answers.outputs import Outputs
from simpro_fast.answers.predict import (
    Chunk,
    Unreadable,
    answer_kinds,
    answers,
    classify,
    item_pixels,
)
from simpro_fast.answers.prior_file import chosen_prior
from simpro_fast.answers.sources import Item, Sources
from simpro_fast.answers.writers import Array, Columns, Csv, Format, table_format
from simpro_fast.cli.answers import conclude, model_flags
from simpro_fast.cli.ending import verb
from simpro_fast.cli.parser import CommandParser, positive
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.printable import printable, show
from simpro_fast.utils.progress import ProgressBar
from simpro_fast.utils.terminal import plain_table, rendered

DESCRIPTION = """\
Classify images: one row per image, in the order of the sources.

SOURCE is an image, a folder (searched to its depths, by name), a pattern ('photos/*.jpg',
'shard-{000..127}.tar'), a tar shard, a manifest (.csv or .parquet with a column path), or - for
a list of paths on standard input, one a line or separated by NUL.

examples:
  simpro-fast predict runs/mine/seed1 photos --output photos.csv
  simpro-fast predict runs/mine/seed1 photos --output photos.parquet --logits photos.npy --resume
  find photos -name '*.jpg' -print0 | simpro-fast predict runs/mine/seed1 - --output photos.csv
  simpro-fast predict runs/mine/seed1 one.jpg"""
EPILOG = """\
Columns: path, member (in a tar shard), status (ok, or why the file could not be read), class,
class_id, probability, margin (to the second class), entropy (nats), top1..k, p1..k.

An interrupted run leaves OUTPUT.parts; --resume goes on from there, with the same bytes in the end.
docs/answers.md explains all of it.

Exit code: 0 all images are answered, 1 some could not be read (0 with --on-bad-image skip) or
the run failed, 2 wrong usage or an output that cannot be written, 130 interrupted."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("simpro-fast predict", DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="run directory or its model.safetensors")
    parser.add_argument("sources", metavar="SOURCE", nargs="*", help="what to classify, see above")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=".csv, .parquet or .jsonl; without it a table on a terminal, else CSV, on stdout",
    )
    parser.add_argument("--top-k", type=positive, default=5, metavar="K", help="classes a row (5)")
    parser.add_argument(
        "--prior",
        default="none",
        metavar="P",
        help="class distribution of these images: none (default), uniform, labeled, estimated (the "
        "training's pi_u), or a file, JSON {class: share} or CSV class,share. none answers "
        "by the plain logits, the paper's test rule. Where the estimate is wrong, answers under it "
        "are, too: in one trial it took the accuracy from 42.7 to 29.5 %%",
    )
    parser.add_argument(
        "--logits",
        type=Path,
        metavar="FILE",
        help="also the plain logits, .npy float32 [rows, K], NaN for images that cannot be read",
    )
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="show paths relative to this folder"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same command was interrupted"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace finished and interrupted output"
    )
    parser.add_argument(
        "--out-of-fold",
        type=positive,
        metavar="K",
        help="in place of sources the labeled images of the run (on cached features), each by a "
        "head that was trained without it: K folds, K trainings of seconds",
    )
    model_flags(parser)
    options = parser.parse(arguments)
    if bool(options.sources) == bool(options.out_of_fold):
        raise ConfigError("give either sources or --out-of-fold K")
    if options.out_of_fold and options.resume:
        raise ConfigError("--out-of-fold goes without --resume")
    if options.output is None:
        for flag in ("logits", "resume", "overwrite"):
            if getattr(options, flag):
                raise ConfigError(f"--{flag} needs --output FILE")
    elif options.logits and os.path.abspath(options.logits) == os.path.abspath(options.output):
        raise ConfigError("--output and --logits are the same file; give one another name")
    if options.logits and options.logits.suffix != ".npy":
        raise ConfigError(f"--logits {options.logits}: its ending must be .npy")
    if options.resume and options.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    return options


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Predict; returns 0 done, 1 some images could not be read, and as `ending.verb`."""
    options = parse_arguments(arguments)
    if options.out_of_fold:
        from simpro_fast.cli.out_of_fold import predict_out_of_fold

        return predict_out_of_fold(options)
    if options.output is not None:  # before seconds of loading
        table_format(options.output, {})
    model = load_model(options.model, options.device, trust_code=options.trust_code)
    prior = chosen_prior(options.prior, model.class_names)
    sources = Sources(options.sources, options.base, sys.stdin.buffer)
    run = _Run(options, model, prior, sources)
    return run.to_stdout() if options.output is None else run.to_files()


@dataclass
class _Counts:
    images: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    unreadable: Unreadable = field(default_factory=Unreadable)

    def add(self, record: dict[str, Any]) -> None:
        self.images += record["images"]
        self.classes.update(record["classes"])
        self.unreadable += Unreadable(Counter(record["bad"]), record["first_bad"])


def _record(chunk: Chunk[Item], columns: Columns) -> dict[str, Any]:
    """What of a chunk is counted."""
    unreadable = Unreadable()
    unreadable.add((_name(item), status) for item, status in chunk.bad)
    return {
        "images": len(chunk.items),
        "classes": Counter(name for name in columns["class"] if name is not None),
        "bad": unreadable.counts,
        "first_bad": unreadable.first,
    }


def _check_some(images: int) -> None:
    if not images:
        raise UserError("the sources hold no image; check the paths")


def _name(item: Item) -> str:
    return f"{item.path} member {item.member}" if item.member else item.path


class _Run:
    """One prediction of all images of the sources."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: TrainedModel,
        prior: str | list[float],
        sources: Sources,
    ) -> None:
        self._options, self._model, self._prior, self._sources = options, model, prior, sources
        self._top_k = min(options.top_k, len(model.class_names))
        self._kinds = answer_kinds(self._top_k)
        self._counts = _Counts()
        self._listed = hashlib.sha256()

    def to_stdout(self) -> int:
        """A table on a terminal, CSV elsewhere, one JSON document with --json."""
        csv = Csv(self._kinds)
        if sys.stdout.isatty():
            head, body = b"", _shown
        else:
            head, body = csv.head(), csv.encode
        out = None if self._options.json else sys.stdout.buffer
        if out:
            out.write(head)
        for chunk, columns in self._chunks(iter(self._sources)):
            self._counts.add(_record(chunk, columns))
            if out:
                out.write(body(columns))
                out.flush()
        _check_some(self._counts.images)
        return self._conclude()

    def to_files(self) -> int:
        """In parts, which are joined at the end."""
        options = self._options
        files: dict[Path, Format] = {options.output: table_format(options.output, self._kinds)}
        if options.logits:
            files[options.logits] = Array(len(self._model.class_names))
        with Outputs(
            files, self._key(), resume=options.resume, overwrite=options.overwrite
        ) as outputs:
            for record in outputs.records:
                self._counts.add(record)
            if outputs.rows and not options.quiet:
                show(f"resumed after {outputs.rows:,} images", file=sys.stderr)
            try:
                self._fill(outputs)
                outputs.finish()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted{self._kept(outputs)}") from None
            except UserError as error:
                raise type(error)(f"{error}{self._kept(outputs)}") from None
        return self._conclude()

    def _kept(self, outputs: Outputs) -> str:
        if not outputs.rows:
            return ""
        return f"; {outputs.rows:,} images are in {outputs.parts}, --resume goes on"

    def _fill(self, outputs: Outputs) -> None:
        items = iter(self._sources)
        known = outputs.records[-1]["listed"] if outputs.records else self._listed.hexdigest()
        for item in islice(items, outputs.rows):
            self._list(item)
        if self._listed.hexdigest() != known:
            raise ConfigError(
                f"the first {outputs.rows:,} images are not those of the run that stopped; give "
                "the same sources, or --overwrite to start anew"
            )
        progress = ProgressBar(
            "predicted", "images", start=outputs.rows, shown=not self._options.quiet
        )
        for chunk, columns in self._chunks(items):
            for item in chunk.items:
                self._list(item)
            record = {**_record(chunk, columns), "listed": self._listed.hexdigest()}
            outputs.append({**columns, "logits": chunk.logits}, record)
            self._counts.add(record)
            progress(outputs.rows)
        progress.close()
        _check_some(outputs.rows)

    def _chunks(self, items: Iterator[Item]) -> Iterator[tuple[Chunk[Item], Columns]]:
        model, options = self._model, self._options
        for chunk in classify(
            model,
            items,
            partial(item_pixels, square=model.file.square),
            batch_size=options.batch_size,
            threads=options.threads or cpu_cores(),
        ):
            probabilities = model.probabilities(chunk.logits, self._prior)
            yield chunk, answers(chunk, probabilities, model.class_names, self._top_k)

    def _list(self, item: Item) -> None:
        self._listed.update(os.fsencode(f"{item.path}\0{item.member}\0"))

    def _key(self) -> dict[str, Any]:
        """All that the bytes of the output depend on, but for the list of images itself."""
        options = self._options
        return {
            "model": self._model.digest(),
            "prior": self._prior,
            "sources": self._sources.names,
            "top_k": self._top_k,
            "base": None if options.base is None else os.path.abspath(options.base),
            "batch_size": options.batch_size,
            "device": self._model.device.type,
            "logits": None if options.logits is None else os.path.abspath(options.logits),
            "version": version("simpro_fast"),
        }

    def _conclude(self) -> int:
        options, counts, names = self._options, self._counts, self._model.class_names
        repeats = self._sources.repeats
        if options.json:
            said = {
                "images": counts.images,
                "classes": {name: counts.classes[name] for name in names},
                "bad_images": dict(counts.unreadable.counts),
                "repeats": repeats,
                "ignored": dict(self._sources.ignored.counts),
                "prior": self._prior,
                "output": None if options.output is None else str(options.output),
                "logits": None if options.logits is None else str(options.logits),
            }
            print(json.dumps(said, indent=1))
        notes = [f"ignored: {line}" for line in self._sources.ignored.lines()]
        if repeats:
            notes.append(f"note: {repeats:,} image(s) were named before; they have a row each time")
        if options.output is not None:
            notes.append(f"{counts.images:,} predictions in {options.output}")
        if chance := chance_warning(self._model.file.confusion):
            notes.append(f"warning: {chance}")
        return conclude(options, options.model, notes, counts.unreadable, counts.images)


def _shown(columns: Columns) -> bytes:
    """Some rows as a terminal shows them."""
    table = plain_table("image", "class", "probability", "margin")
    for path, member, status, name, p, margin in zip(
        *(columns[key] for key in ("path", "member", "status", "class", "probability", "margin")),
        strict=True,
    ):
        image = printable(f"{path} member {member}" if member else path)
        if name is None:
            table.add_row(image, status.partition(":")[0], "", "")  # the end names the reason
        else:
            table.add_row(image, printable(name), f"{p:.4f}", f"{margin:.4f}")
    return f"{rendered(table, sys.stdout)}\n".encode(errors="backslashreplace")
