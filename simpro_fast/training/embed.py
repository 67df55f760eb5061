"""Features of all images: made once by `embed`, and opened by the runs that train on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from simpro_fast.answers.evaluation import network_input
from simpro_fast.config import Config
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.features import (
    DAMAGED,
    DESCRIPTION,
    Damaged,
    Description,
    open_features,
    parts_of,
    read_damaged,
)
from simpro_fast.data.loader import build_loader
from simpro_fast.data.splits.split import Split, with_counts
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models import feature_size
from simpro_fast.training.features import FeatureExtractor, describe, pretrained_network
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.file_lock import locked
from simpro_fast.utils.file_schema import Count, FileSchema, read_as
from simpro_fast.utils.machine import cpu_cores

logger = logging.getLogger(__name__)

AUTO, PROGRESS = "auto", "progress.json"
BATCH = 64
"""Images of a forward pass while views are embedded."""
SAVE_EVERY = 20.0
"""Seconds between two times that what is done is flushed to disk and noted."""


class _Progress(FileSchema):
    """How far an unfinished folder has come: of the features `digest`, so many forward passes."""

    digest: str
    done: Count


def cached(
    config: Config,
    dataset: ArrayDataset,
    split: Split,
    fingerprint: dict[str, str],
    ranks: Ranks,
    *,
    write: bool,
) -> tuple[ArrayDataset, Split]:
    """The data set and split that `train.features` makes of these: themselves without it.

    With `train.features=auto` rank 0 makes the features where nobody has, while the others wait.
    Images that had none (damaged ones, with data.on_bad_image=skip) leave the split.

    Args:
        fingerprint: of the run; the digest of the features is added to it, and that of the split.
        write: False makes no features.

    Raises: as `embed`, `describe` and `open_features`.
    """
    folder = config.train.features
    if folder is None:
        return dataset, split
    expected = describe(config, dataset, fingerprint["data"])
    if str(folder) == AUTO:
        folder = _made_once(config, dataset, expected, ranks, write=write)
    if (folder / PROGRESS).exists() or not (folder / DESCRIPTION).exists():
        raise UserError(
            f"train.features={folder} has no finished features; make them by simpro-fast embed "
            f"CONFIG --output {folder}, with --resume where that was interrupted"
        )
    features = open_features(folder, expected, dataset)
    fingerprint["features"] = features.description.digest()
    split = features.usable(split, dataset)
    fingerprint["split"] = split.hash()
    return features.dataset(dataset), split


def _made_once(
    config: Config, dataset: ArrayDataset, described: Description, ranks: Ranks, *, write: bool
) -> Path:
    """The folder of features for `train.features=auto`, whose name says what they are of."""
    config = config.model_copy(update={"seed": 0})  # one folder for all seeds of runs
    described = described.model_copy(update={"seed": 0})
    weak = 2
    strong = weak * max(2, -(-config.strong_views // weak))
    name = described.model_copy(update={"weak": weak, "strong": strong}).digest()[:12]
    folder = (config.data.cache_dir or config.output_dir) / f"features-{name}"
    if ranks.is_main:
        # Runs that start together wait here for the first of them.
        with locked(folder.with_suffix(".lock"), "set data.cache_dir", remove=True):
            if not (folder / DESCRIPTION).exists():
                if not write:
                    raise UserError(
                        "train.features=auto: only a training makes the features; make them by "
                        f"simpro-fast embed CONFIG --output {folder} --strong {strong}"
                    )
                logger.info("embedding %d images, once, into %s", len(dataset.images), folder)
                begun = (folder / PROGRESS).exists()
                embed(config, dataset, ranks, folder, weak=weak, strong=strong, resume=begun)
    ranks.barrier()
    return folder


@dataclass(frozen=True)
class _Pass:
    """One forward pass: which views of which rows its features go to."""

    part: str
    features: Callable[[], tuple[Tensor, np.ndarray, np.ndarray]]
    """Gives features [n, D], rows int64 [n] and views int64 [n] of the part's array."""


def embed(
    config: Config,
    dataset: ArrayDataset,
    ranks: Ranks,
    folder: Path,
    *,
    weak: int,
    strong: int,
    resume: bool,
) -> Description:
    """Write the features of every image of a data set, in several views; see `data.features`.

    Views are drawn and made as in training, each image once in each pass. After a kill the same
    call with `resume` goes on, to the same bytes.

    Args:
        dataset: normalised as the weights want it.
        weak: weak views of each image. strong: strong ones, a multiple of `weak`.
        resume: go on with an unfinished folder; without it the folder must be empty.

    Raises:
        ConfigError: no weights are given, the numbers of views do not fit, or `resume` of features
            of something else.
        UserError: the folder is in use or not empty; images or weights cannot be read; a feature is
            not finite.
        OutputError: the disk is full.
    """
    if weak < 1 or strong % weak:
        raise ConfigError(f"--strong {strong} must be a multiple of --weak {weak}, at least 1")
    described = describe(config, dataset, dataset.fingerprint())
    network = pretrained_network(config, dataset).to(ranks.device)
    sizes = {"weak": weak, "strong": strong, "features": feature_size(network)}
    described = described.model_copy(update=sizes)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", "choose another --output", wait=False, remove=True):
        done = _begun(folder, described, resume=resume)
        extract = FeatureExtractor(network, bf16=config.train.precision == "bf16")
        arrays = _arrays(folder, described, dataset, fresh=done == 0)
        damaged = read_damaged(folder)
        passes = _Passes(config, dataset, ranks, extract, described, damaged)
        saved = time.monotonic()
        for number, one in enumerate(passes.after(done), start=done + 1):
            features, rows, views = one.features()
            kept = features.to("cpu", torch.float16)
            if not kept.isfinite().all():
                raise UserError(
                    f"{config.model.weights}: a feature of {one.part} is not finite in float16; "
                    "check data.mean and data.std, or take other weights"
                )
            arrays[one.part][rows, views] = kept.numpy()
            if time.monotonic() - saved > SAVE_EVERY:
                _note(folder, arrays, damaged, described, number)
                saved = time.monotonic()
                logger.info("%d of %d forward passes", number, passes.total)
        _note(folder, arrays, damaged, described, passes.total)
        described = described.model_copy(update={"length": _mean_length(arrays["images"])})
        write_json(folder / DESCRIPTION, described.model_dump())
        (folder / PROGRESS).unlink()
    return described


def _begun(folder: Path, described: Description, *, resume: bool) -> int:
    """Forward passes that an earlier call has done."""
    path, others = folder / PROGRESS, [p for p in folder.iterdir() if p.name != ".lock"]
    if not others:
        return 0
    if not resume:
        raise UserError(
            f"{folder} is not empty; give another --output, or --resume to go on with it"
        )
    if (folder / DESCRIPTION).exists():
        raise UserError(f"{folder} is finished already; give another --output, or delete it")
    if not path.exists():
        raise UserError(f"{folder} holds no unfinished features; give another --output")
    progress = read_as(path, _Progress)
    if progress.digest != described.digest():
        raise ConfigError(
            f"{folder} was begun with other weights, images or views; give another --output"
        )
    return progress.done


def _arrays(
    folder: Path, described: Description, dataset: ArrayDataset, *, fresh: bool
) -> dict[str, np.ndarray]:
    """The memory-mapped files, of their full size from the beginning."""
    if fresh:
        write_json(folder / PROGRESS, {"digest": described.digest(), "done": 0})
    found: dict[str, np.ndarray] = {}
    for part, images in parts_of(dataset).items():
        views = 1 if part == "test" else 1 + described.weak + described.strong
        found[part] = np.lib.format.open_memmap(
            folder / f"{part}.npy",
            mode="w+" if fresh else "r+",
            dtype=np.float16,
            shape=(len(images), views, described.features) if fresh else None,
        )
    return found


def _note(
    folder: Path,
    arrays: dict[str, np.ndarray],
    damaged: Damaged,
    described: Description,
    done: int,
) -> None:
    """Say that so many passes are on disk; only after they are."""
    for array in arrays.values():
        assert isinstance(array, np.memmap)
        array.flush()
    if any(damaged.values()):
        write_json(folder / DAMAGED, damaged)
    write_json(folder / PROGRESS, {"digest": described.digest(), "done": done})


def _mean_length(images: np.ndarray) -> float:
    """Of view 0 of all images."""
    blocks = (images[i : i + 4096, 0].astype(np.float64) for i in range(0, len(images), 4096))
    return float(np.concatenate([np.linalg.norm(block, axis=1) for block in blocks]).mean())


class _Passes:
    """All forward passes of `embed`, in a fixed order; each is a pure function of its number."""

    def __init__(
        self,
        config: Config,
        dataset: ArrayDataset,
        ranks: Ranks,
        extract: FeatureExtractor,
        described: Description,
        damaged: Damaged,
    ) -> None:
        self._config, self._dataset, self._ranks = config, dataset, ranks
        self._extract, self._described, self._damaged = extract, described, damaged
        self._plain = [
            (part, first)
            for part, images in parts_of(dataset).items()
            for first in range(0, len(images), BATCH)
        ]

    @property
    def total(self) -> int:
        """How many there are; a few less once damaged images are known."""
        return len(self._plain) + sum(self._steps(part) for part in self._with_views())

    def after(self, done: int) -> Iterator[_Pass]:
        """The passes from number `done` on."""
        for part, first in self._plain[done:]:
            yield _Pass(part, lambda part=part, first=first: self._as_evaluation(part, first))  # type: ignore[misc]
        done = max(0, done - len(self._plain))
        for part in self._with_views():
            steps = self._steps(part)
            if done < steps:
                yield from self._in_views(part, range(done, steps))
            done = max(0, done - steps)

    def _with_views(self) -> list[str]:
        return [part for part in parts_of(self._dataset) if part != "test"]

    def _whole(self, part: str) -> np.ndarray:
        """Rows of the images that are not damaged, int64; known after the plain passes."""
        images = parts_of(self._dataset)[part]
        damaged = np.array(list(self._damaged.get(part, {})), np.int64)
        return np.setdiff1d(np.arange(len(images)), damaged)

    def _steps(self, part: str) -> int:
        """Steps of a loader in which every image comes `weak` times."""
        count = len(self._whole(part))
        return -(-count * self._described.weak // max(1, min(BATCH, count)))

    def _as_evaluation(self, part: str, first: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
        dataset, images = self._dataset, parts_of(self._dataset)[part]
        rows = np.arange(first, min(first + BATCH, len(images)))
        try:
            pixels = np.asarray(images[first : first + BATCH])
        except UserError:
            if self._config.data.on_bad_image == "error":
                raise
            rows = np.array([row for row in rows if self._can_be_read(part, int(row))], np.int64)
            pixels = np.asarray(images[rows])
        views = network_input(
            torch.as_tensor(pixels).to(self._ranks.device), dataset.mean, dataset.std, torch.float32
        )
        return self._extract(views), rows, np.zeros(len(rows), np.int64)

    def _can_be_read(self, part: str, row: int) -> bool:
        """Whether an image can; of one that cannot the reason is kept."""
        try:
            parts_of(self._dataset)[part][row : row + 1]
        except UserError as error:
            self._damaged.setdefault(part, {})[row] = str(error)
            logger.warning("skipped %s", error)
            return False
        return True

    def _in_views(self, part: str, steps: range) -> Iterator[_Pass]:
        """Weak and strong views of every image, `weak` times.

        A training loader over a split in which every image is unlabeled: each image comes once in
        a pass of its order, and the number of the pass says which of the cached views these are.
        """
        config, described, dataset = self._config, self._described, self._dataset
        everything = self._whole(part)
        count, size = len(everything), min(BATCH, len(everything))
        if part == "images":
            dataset = replace(dataset, unlabeled_images=None)
        split = with_counts(everything[:1], everything, everything[:0], dataset, True)
        alone = {"batch_size": 1, "mu": size, "sampling": "shuffle", "class_balanced_steps": 0}
        settings = LoaderSettings(
            data=config.data.model_copy(update=alone),
            labeled_views=1,
            strong_views=described.strong // described.weak,
            seed=config.seed,
            device=self._ranks.device,
            start_step=steps.start,
            num_threads=config.train.data_threads or config.train.threads or cpu_cores(),
        )
        loader = build_loader(settings, dataset, split)
        each = settings.strong_views

        def one(step: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
            batch = loader.next(step)
            assert batch.unlabeled_positions is not None
            if getattr(loader, "replaced", 0):
                raise UserError(
                    "an image that could be read is refused by the decoder of training; it is "
                    "named above: run simpro-fast prepare, which leaves such images out"
                )
            rows = everything[batch.unlabeled_positions.cpu().numpy()]
            number = np.arange(step * size, (step + 1) * size) // count
            views = [1 + number]
            for v in range(each):
                views.append(1 + described.weak + number * each + v)
            kept = np.tile(number < described.weak, 1 + each)
            features = self._extract(batch.views[1:].float())[torch.from_numpy(kept)]
            return features, np.tile(rows, 1 + each)[kept], np.concatenate(views)[kept]

        try:
            for step in steps:
                yield _Pass(part, lambda step=step: one(step))  # type: ignore[misc]
        finally:
            loader.close()
