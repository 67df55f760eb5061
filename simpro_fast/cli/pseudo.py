"""`simpro-fast pseudo`: pseudo-labels, and which images to label next."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.model import TrainedModel, load_model
from simpro_fast.answers.outputs import Outputs
from simpro_fast.answers.predict import Chunk, Unreadable, spread_over
from simpro_fast.answers.pseudo import Answers, TrainingRule
from simpro_fast.answers.unlabeled import UnlabeledSet, unlabeled_set
from simpro_fast.answers.writers import Array, Columns, Csv, Format, table_format
from simpro_fast.cli.answers import conclude, model_flags
from simpro_fast.cli.ending import verb
from simpro_fast.cli.parser import CommandParser, positive
from simpro_fast.data.files.added_labels import check_no_labels
from simpro_fast.data.files.decode import OK
from simpro_fast.data.files.manifest import relative
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.printable import printable
from simpro_fast.utils.progress import ProgressBar
from simpro_fast.utils.terminal import plain_table, rendered

DESCRIPTION = """\
Pseudo-labels of a run's unlabeled images, and which of them to label next.

examples:
  simpro-fast pseudo runs/mine/seed1
  simpro-fast pseudo runs/mine/seed1 --queue 200
  simpro-fast pseudo runs/mine/seed1 --output photos.parquet --logits photos.npy

Fill in the column label of queue.csv, then
  simpro-fast prepare --add-labels queue.csv ... and train again."""
EPILOG = """\
Columns: path and member (index for data sets that are arrays), status, pseudo_class,
pseudo_probability, kept (whether the training would learn from it: its rule at its end).

Exit code: 0 done, 1 some images could not be read (0 with --on-bad-image skip) or it failed,
2 wrong usage or an output that cannot be written, 130 interrupted. docs/answers.md explains the
queue."""
_DEFAULT = "pseudo.csv"
_QUEUE = "queue.csv"
_PLACE = {"path": "text", "member": "text"}
_SHOWN_CLASSES = 100
_BLOCK = 1 << 16
"""Rows written at a time."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("simpro-fast pseudo", DESCRIPTION, EPILOG)
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a finished run")
    parser.add_argument(
        "--queue",
        type=positive,
        metavar="N",
        help="also write queue.csv beside the output: the N images that are worth a label most",
    )
    parser.add_argument(
        "--measure",
        choices=("margin", "entropy"),
        default="margin",
        help="of uncertainty: a small lead of the first class (default), or a large entropy",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=".csv, .parquet or .jsonl (default: RUN/pseudo.csv)",
    )
    parser.add_argument(
        "--logits", type=Path, metavar="FILE", help="also the plain logits, .npy float32 [rows, K]"
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="paths relative to this folder (default: that of the output)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides between equally uncertain images (0)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    model_flags(parser)
    options = parser.parse(arguments)
    options.output = options.output or options.run / _DEFAULT
    if options.queue and options.output.name == _QUEUE:
        raise ConfigError(f"--output {options.output}: --queue writes that file; give another name")
    if options.logits and options.logits.suffix != ".npy":
        raise ConfigError(f"--logits {options.logits}: its ending must be .npy")
    return options


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Write pseudo-labels; returns 0 done, 1 some images could not be read, and as `verb`."""
    return _Run(parse_arguments(arguments)).run()


class _Run:
    """One look at all unlabeled images. Places are int64 and count `UnlabeledSet.dataset_rows`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._output: Path = options.output
        self._queue: Path = self._output.with_name(_QUEUE)
        self._model: TrainedModel = load_model(
            options.run, options.device, trust_code=options.trust_code
        )
        self._set: UnlabeledSet = unlabeled_set(options.run, trust_code=options.trust_code)
        self._rule = TrainingRule(self._set, self._model)
        self._names = self._model.class_names
        self._answers = Answers(
            self._set,
            self._model,
            batch_size=options.batch_size,
            threads=options.threads or cpu_cores(),
        )

    def run(self) -> int:
        options = self._options
        forms: dict[Path, Format] = {self._output: table_format(self._output, self._kinds())}
        if options.logits:
            forms[options.logits] = Array(len(self._names))
        if options.queue:  # last, so that labels typed meanwhile do not lose the others
            forms[self._queue] = Csv(self._queue_kinds())
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(
                    Outputs({path: form}, None, overwrite=options.overwrite, check=self._may_go)
                )
                for path, form in forms.items()
            }
            self._look(files.get(options.logits))
            chosen = everything = np.arange(len(self._answers))
            if options.queue:
                chosen = self._answers.queue(
                    options.queue, measure=options.measure, seed=options.seed
                )
                files[self._queue].append(self._queue_columns(chosen), {})
            for block in _blocks(everything):
                files[self._output].append(self._columns(block), {})
            for outputs in files.values():
                outputs.finish()
        return self._conclude(chosen if options.queue else None)

    def _may_go(self, path: Path) -> None:
        """A person's work is not replaced, whatever flag is given."""
        if path == self._queue:
            key = "index" if self._set.listed is None else "path"
            check_no_labels(path, tuple(self._queue_kinds()), key)

    def _look(self, logits: Outputs | None) -> None:
        progress = ProgressBar("classified", "images", shown=not self._options.quiet)

        def after(chunk: Chunk[int]) -> None:
            if logits is not None:
                logits.append({"logits": chunk.logits}, {})
            progress(chunk.items[-1] + 1, len(self._answers))

        self._answers.fill(self._rule, after)
        progress.close()

    def _who(self, places: np.ndarray) -> dict[str, Sequence[Any]]:
        """What names the images."""
        numbers, rows = self._set.dataset_rows[places].tolist(), self._set.listed
        if rows is None:
            return {"index": numbers}
        base = Path(os.path.abspath(self._options.base or self._output.parent))
        paths = [relative(rows[i].path, base) for i in numbers]
        return {"path": paths, "member": [rows[i].member for i in numbers]}

    def _columns(self, places: np.ndarray) -> Columns:
        answers = self._answers
        read = answers.labels[places] >= 0
        good = places[read]
        return {
            **self._who(places),
            "status": [answers.bad.get(place, OK) for place in places.tolist()],
            "pseudo_class": spread_over(read, (self._names[k] for k in answers.labels[good])),
            "pseudo_probability": spread_over(read, answers.confidence[good]),
            "kept": spread_over(read, answers.kept[good]),
        }

    def _queue_columns(self, places: np.ndarray) -> Columns:
        answers = self._answers
        return {
            **self._who(places),
            "label": [""] * len(places),
            "predicted": [self._names[k] for k in answers.predicted[places]],
            "probability": answers.probability[places],
            "margin": answers.margin[places],
            "entropy": answers.entropy[places],
        }

    def _kinds(self) -> dict[str, str]:
        who = {"index": "integer"} if self._set.listed is None else _PLACE
        own = {"status": "text", "pseudo_class": "text", "pseudo_probability": "number"}
        return {**who, **own, "kept": "flag"}

    def _queue_kinds(self) -> dict[str, str]:
        who = {"index": "integer"} if self._set.listed is None else _PLACE
        numbers = dict.fromkeys(("probability", "margin", "entropy"), "number")
        return {**who, "label": "text", "predicted": "text", **numbers}

    def _conclude(self, chosen: np.ndarray | None) -> int:
        options, answers = self._options, self._answers
        if options.json:
            print(json.dumps(self._facts(chosen), indent=1))
        elif not options.quiet:
            for line in self._lines(chosen):
                print(line)
        notes = []
        if chosen is not None and len(chosen) < options.queue:
            notes.append(
                f"note: {len(chosen)} of {options.queue} places are filled; all other images look "
                "like one of these"
            )
        if chance := chance_warning(self._model.file.confusion):
            notes.append(f"warning: {chance}")
        return conclude(options, options.run, notes, self._unreadable, len(answers))

    @property
    def _unreadable(self) -> Unreadable:
        found, bad = Unreadable(), self._answers.bad
        paths = self._who(np.array(list(bad), np.int64))["path"] if bad else []
        found.add(zip(paths, bad.values(), strict=True))
        return found

    def _per_class(self, labels: np.ndarray) -> list[int]:
        counts: list[int] = np.bincount(labels, minlength=len(self._names)).tolist()
        return counts

    def _facts(self, chosen: np.ndarray | None) -> dict[str, Any]:
        answers = self._answers
        kept = self._per_class(answers.labels[answers.kept])
        return {
            "images": len(answers),
            "kept": sum(kept),
            "threshold": self._rule.threshold,
            "kept_per_class": dict(zip(self._names, kept, strict=True)),
            "bad_images": dict(self._unreadable.counts),
            "queue": None if chosen is None else len(chosen),
            "output": str(self._output),
        }

    def _lines(self, chosen: np.ndarray | None) -> Iterator[str]:
        """The summary for the terminal."""
        answers, pi_u = self._answers, self._model.file.pi_u
        columns = {
            "class": [printable(name) for name in self._names],
            "labeled": list(map(str, self._set.split.labeled_counts)),
            "pi_u": [f"{100 * share / sum(pi_u):.1f} %" for share in pi_u],
            "kept": list(map(str, self._per_class(answers.labels[answers.kept]))),
        }
        if chosen is not None:
            columns["queue"] = list(map(str, self._per_class(answers.predicted[chosen])))
        table = plain_table(*columns)
        for row in islice(zip(*columns.values(), strict=True), _SHOWN_CLASSES):
            table.add_row(*row)
        yield rendered(table, sys.stdout)
        if len(self._names) > _SHOWN_CLASSES:
            yield f"... and {len(self._names) - _SHOWN_CLASSES} more classes"
        kept, bound = int(answers.kept.sum()), self._rule.threshold
        yield f"{kept:,} of {len(answers):,} images kept (probability of {bound:g} or more)"
        yield printable(f"pseudo-labels {self._output}")
        if chosen is not None:
            yield printable(f"queue {self._queue}: fill in its column `label`")


def _blocks(places: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(places), _BLOCK):
        yield places[start : start + _BLOCK]
