"""A frozen backbone: its features of every image, made once, and the network that they train."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from simpro_fast.answers.evaluation import network_input
from simpro_fast.config import Config
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.features import (
    DESCRIPTION,
    Description,
    FeatureDataset,
    open_features,
    parts_of,
)
from simpro_fast.data.loader import build_loader, resolve_augment
from simpro_fast.data.splits.split import with_counts
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models import (
    HeadNetwork,
    build_model,
    classifier_of,
    feature_size,
    load_pretrained,
    weights_file,
)
from simpro_fast.models.pretrained import weights_sha256
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.file_lock import locked
from simpro_fast.utils.file_schema import Count, FileSchema, read_as
from simpro_fast.utils.machine import cpu_cores

logger = logging.getLogger(__name__)

PROGRESS = "progress.json"
BATCH = 64
"""Images of a forward pass while views are embedded."""
SAVE_EVERY = 20.0
"""Seconds between two times that what is done is flushed to disk and noted."""


class _Progress(FileSchema):
    """How far an unfinished folder has come: of the features `digest`, so many forward passes."""

    digest: str
    done: Count


def describe(config: Config, dataset: ArrayDataset, data: str) -> Description:
    """What features of this configuration are of.

    Args:
        dataset: normalised as the weights want it.
        data: its fingerprint.

    Raises:
        ConfigError: no weights are given.
        UserError: the weights cannot be read.
    """
    file = weights_file(config.model)
    if file is None:
        raise ConfigError("features need a trained backbone; set model.weights")
    augment = resolve_augment(config.data, dataset)
    return Description(
        model=config.model.name,
        weights=weights_sha256(file),
        data=data,
        image_size=dataset.image_size,
        mean=list(dataset.mean),
        std=list(dataset.std),
        views={"shift": augment.max_shift, "flip": augment.flip, "cutout": augment.cutout},
        seed=config.seed,
        weak=0,
        strong=0,
        features=0,
        length=0.0,
    )


def cached(config: Config, dataset: ArrayDataset, fingerprint: dict[str, str]) -> ArrayDataset:
    """The data set that `train.features` makes of `dataset`: itself where none are asked for.

    Args:
        fingerprint: of the run; their digest is added to it.

    Raises: as `describe` and `open_features`.
    """
    folder = config.train.features
    if folder is None:
        return dataset
    if (folder / PROGRESS).exists() or not (folder / DESCRIPTION).exists():
        raise UserError(
            f"train.features={folder} has no finished features; make them by simpro-fast embed "
            f"CONFIG --output {folder}, with --resume where that was interrupted"
        )
    expected = describe(config, dataset, fingerprint["data"])
    features = open_features(folder, expected, dataset)
    fingerprint["features"] = features.description.digest()
    return features.dataset(dataset)


def pretrained_network(config: Config, dataset: ArrayDataset) -> nn.Module:
    """The whole network with the weights of `model.weights`, in evaluation mode on the CPU."""
    file = weights_file(config.model)
    assert file is not None
    network = build_model(
        config.model, dataset.num_classes, dataset.image_size, seed=config.seed, exported=True
    )
    load_pretrained(network, file)
    return network.eval().requires_grad_(False)


def whole_network(config: Config, dataset: ArrayDataset, trained: nn.Module) -> nn.Module:
    """Backbone and trained head in one network, what is exported; `trained` where it is whole."""
    if not isinstance(dataset, FeatureDataset):
        return trained
    assert isinstance(trained, HeadNetwork)
    network = pretrained_network(config, dataset)
    trained.copy_to(classifier_of(network))
    return network


class FeatureExtractor(nn.Module):
    """Views to the features [n, D] that the classifier of a network sees.

    Args:
        network: in evaluation mode, on the device of the views.
        bf16: whether its forward pass is autocast.
    """

    def __init__(self, network: nn.Module, *, bf16: bool = False) -> None:
        super().__init__()
        self._network, self._bf16 = network, bf16
        self._seen: list[Tensor] = []
        # What its classifier gets; so the network may be of any kind.
        classifier_of(network).register_forward_pre_hook(lambda _, x: self._seen.append(x[0]))

    @torch.no_grad()
    def forward(self, views: Tensor) -> Tensor:
        with torch.autocast(views.device.type, torch.bfloat16, enabled=self._bf16):
            self._network(views)
        return self._seen.pop()


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
        passes = _Passes(config, dataset, ranks, extract, described)
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
                _note(folder, arrays, described, number)
                saved = time.monotonic()
                logger.info("%d of %d forward passes", number, passes.total)
        _note(folder, arrays, described, passes.total)
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


def _note(folder: Path, arrays: dict[str, np.ndarray], described: Description, done: int) -> None:
    """Say that so many passes are on disk; only after they are."""
    for array in arrays.values():
        assert isinstance(array, np.memmap)
        array.flush()
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
    ) -> None:
        self._config, self._dataset, self._ranks = config, dataset, ranks
        self._extract, self._described = extract, described
        self._plain = [
            (part, first)
            for part, images in parts_of(dataset).items()
            for first in range(0, len(images), BATCH)
        ]
        self._augmented = {
            part: -(-len(images) * described.weak // self._images_of(images))
            for part, images in parts_of(dataset).items()
            if part != "test"
        }
        self.total = len(self._plain) + sum(self._augmented.values())

    @staticmethod
    def _images_of(images: np.ndarray) -> int:
        """Images of one step of a loader."""
        return min(BATCH, len(images))

    def after(self, done: int) -> Iterator[_Pass]:
        """The passes from number `done` on."""
        for part, first in self._plain[done:]:
            yield _Pass(part, lambda part=part, first=first: self._as_evaluation(part, first))  # type: ignore[misc]
        done = max(0, done - len(self._plain))
        for part, steps in self._augmented.items():
            if done < steps:
                yield from self._in_views(part, range(done, steps))
            done = max(0, done - steps)

    def _as_evaluation(self, part: str, first: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
        dataset, images = self._dataset, parts_of(self._dataset)[part]
        rows = np.arange(first, min(first + BATCH, len(images)))
        pixels = torch.as_tensor(np.asarray(images[first : first + BATCH])).to(self._ranks.device)
        views = network_input(pixels, dataset.mean, dataset.std, torch.float32)
        return self._extract(views), rows, np.zeros(len(rows), np.int64)

    def _in_views(self, part: str, steps: range) -> Iterator[_Pass]:
        """Weak and strong views of every image, `weak` times.

        A training loader over a split in which every image is unlabeled: each image comes once in
        a pass of its order, and the number of the pass says which of the cached views these are.
        """
        config, described, dataset = self._config, self._described, self._dataset
        images = parts_of(dataset)[part]
        count, size = len(images), self._images_of(images)
        if part == "images":
            dataset = replace(dataset, unlabeled_images=None)
        everything = np.arange(count)
        split = with_counts(np.arange(1), everything, everything[:0], dataset, True)
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
            rows = batch.unlabeled_positions.cpu().numpy()
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
