"""What the data pipeline is measured against: the same views made by other people's libraries.

All give endless float32 batches, normalised, channels_last. The two libraries' stock RandAugment
applies both of its operations to every strong view; ours and the Pillow policy each with
probability 1/2. Arrays are padded once, before the clock starts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from baseline import StrongPolicy
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from simpro_fast.config import Config
from simpro_fast.data.batch import AugmentConfig, BatchLayout
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import FileImages
from simpro_fast.data.loader import build_loader
from simpro_fast.data.splits.split import Split

GREY = 127
MAGNITUDE = 9


@dataclass(frozen=True)
class Work:
    """What every side makes."""

    name: str
    config: Config
    dataset: ArrayDataset
    split: Split
    augment: AugmentConfig
    layout: BatchLayout
    threads: int
    """Threads or worker processes that a side may use."""

    @property
    def paths(self) -> list[str] | None:
        """Files of the labeled images, then of the unlabeled ones; None for arrays."""
        if not isinstance(self.dataset.images, FileImages):
            return None
        rows = np.concatenate([self.split.labeled, self.split.unlabeled])
        return [str(self.dataset.images.rows[row].image) for row in rows]

    def padded(self) -> np.ndarray:
        """Labeled, then unlabeled images with reflected borders: uint8 [N, H+2p, W+2p, 3]."""
        rows = np.concatenate([self.split.labeled, self.split.unlabeled])
        pad = self.augment.max_shift
        return np.pad(
            self.dataset.images[rows], ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect"
        )


class Side(Protocol):
    """One of those compared."""

    def next(self) -> Tensor: ...

    def processes(self) -> list[int]:
        """Worker processes, by id."""

    def close(self) -> None: ...


class Ours:
    """The loader that training uses."""

    def __init__(self, work: Work) -> None:
        self._loader = build_loader(
            work.config.data,
            work.dataset,
            work.split,
            labeled_views=work.layout.labeled_views,
            strong_views=work.layout.strong_views,
            seed=1,
            rank=0,
            world_size=1,
            device=torch.device("cpu"),
            start_step=0,
            num_threads=work.threads,
        )
        self._step = 0

    def next(self) -> Tensor:
        self._step += 1
        return self._loader.next(self._step - 1).views

    def processes(self) -> list[int]:
        return []

    def close(self) -> None:
        self._loader.close()


class _Batches:
    """Endless batches of positions: labeled ones, then unlabeled ones."""

    def __init__(self, work: Work) -> None:
        self._labeled, self._unlabeled = len(work.split.labeled), len(work.split.unlabeled)
        self._layout = work.layout

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng(1)
        while True:
            labeled = generator.integers(self._labeled, size=self._layout.labeled)
            unlabeled = generator.integers(self._unlabeled, size=self._layout.unlabeled)
            yield [*labeled.tolist(), *(self._labeled + unlabeled).tolist()]


class _ViewsOfImages(Dataset[Any]):
    """All views of one image, as uint8 arrays or finished tensors."""

    def __init__(self, work: Work, kind: str) -> None:
        self._paths, self._kind = work.paths, kind
        self._padded = np.empty(0) if self._paths else work.padded()
        self._labeled = len(work.split.labeled)
        self._layout, augment, data = work.layout, work.augment, work.config.data
        side = augment.image_size
        if self._paths:
            weak, strong = (
                v2.RandomResizedCrop(side, scale=scale, ratio=data.crop_ratio)
                for scale in (data.weak_scale, data.strong_scale)
            )
        else:
            weak = strong = v2.RandomCrop(side)
        flip = [v2.RandomHorizontalFlip()] if augment.flip else []
        self._weak: list[Any] = [weak, *flip]
        if kind == "pillow":
            self._strong: list[Any] = [strong, *flip, StrongPolicy(augment.cutout)]
            return
        share = (augment.cutout / side) ** 2
        finish = [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(augment.mean), list(augment.std)),
        ]
        to_tensor = [v2.PILToTensor()] if kind == "pil" else []
        erase = v2.RandomErasing(1.0, (share, share), (1.0, 1.0), GREY)
        policy = v2.RandAugment(num_ops=2, magnitude=MAGNITUDE)
        self._weak += [*to_tensor, *finish]
        self._strong = [strong, *flip, policy, *to_tensor, erase, *finish]

    def __len__(self) -> int:
        return len(self._paths) if self._paths else len(self._padded)

    def _image(self, index: int) -> Any:
        if self._paths:
            image = Image.open(self._paths[index]).convert("RGB")
        elif self._kind == "tensor":
            return torch.from_numpy(self._padded[index]).permute(2, 0, 1)
        else:
            return Image.fromarray(self._padded[index])
        return v2.functional.pil_to_tensor(image) if self._kind == "tensor" else image

    def __getitem__(self, index: int) -> list[Any]:
        image, layout = self._image(index), self._layout
        strong = layout.labeled_views - 1 if index < self._labeled else layout.strong_views
        views = []
        for steps in [self._weak, *[self._strong] * strong]:
            view = image
            for step in steps:
                view = step(view)
            views.append(np.asarray(view) if self._kind == "pillow" else view)
        return views


class _Collate:
    """View-major batches; normalises those that are still uint8."""

    def __init__(self, work: Work) -> None:
        self._labeled = work.layout.labeled
        self._mean = 255 * torch.tensor(work.augment.mean)
        self._scale = 1 / (255 * torch.tensor(work.augment.std))

    def __call__(self, images: list[list[Any]]) -> Tensor:
        parts = images[: self._labeled], images[self._labeled :]
        views = [view for part in parts for views in zip(*part, strict=True) for view in views]
        if isinstance(views[0], Tensor):
            return torch.stack(views).contiguous(memory_format=torch.channels_last)
        pixels = torch.from_numpy(np.stack(views)).float()
        return pixels.sub_(self._mean).mul_(self._scale).permute(0, 3, 1, 2)


class Workers:
    """A DataLoader: kind "pillow" is our policy in Pillow, "pil" and "tensor" torchvision v2."""

    def __init__(self, work: Work, kind: str) -> None:
        loader = DataLoader(
            _ViewsOfImages(work, kind),
            batch_sampler=_Batches(work),
            num_workers=work.threads,
            collate_fn=_Collate(work),
        )
        self._iterator: Any = iter(loader)

    def next(self) -> Tensor:
        return next(self._iterator)

    def processes(self) -> list[int]:
        return [worker.pid for worker in self._iterator._workers]

    def close(self) -> None:
        self._iterator._shutdown_workers()


class DaliStock:
    """DALI with its own RandAugment (nvidia.dali.auto_aug) and its own random numbers."""

    def __init__(self, work: Work) -> None:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.auto_aug import rand_augment

        layout, augment, data = work.layout, work.augment, work.config.data
        side, paths = augment.image_size, work.paths
        drawn = layout.labeled + layout.unlabeled
        mean, std = ([255 * value for value in part] for part in (augment.mean, augment.std))

        def finish(pixels: Any, **crop: Any) -> Any:
            return fn.crop_mirror_normalize(
                pixels, mean=mean, std=std, dtype=types.FLOAT, output_layout="HWC", **crop
            )

        def strengthen(pixels: Any) -> Any:
            pixels = rand_augment.rand_augment(
                pixels, n=2, m=MAGNITUDE, fill_value=0, shape=(side, side)
            )
            return fn.erase(
                pixels,
                anchor=fn.random.uniform(range=(0, side - augment.cutout), shape=2),
                shape=(augment.cutout, augment.cutout),
                axes=(0, 1),
                fill_value=GREY,
            )

        def coin() -> Any:
            return fn.random.coin_flip() if augment.flip else 0

        @pipeline_def(enable_conditionals=True)
        def from_arrays() -> Any:
            images, strong = fn.external_source(
                source=self._source, num_outputs=2, batch=True, layout=["HWC", ""]
            )
            pixels = fn.crop_mirror_normalize(
                images,
                crop=(side, side),
                crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
                crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
                mirror=coin(),
                mean=[0.0] * 3,
                std=[1.0] * 3,
                dtype=types.UINT8,
                output_layout="HWC",
            )
            if strong:
                pixels = strengthen(pixels)
            return finish(pixels)

        @pipeline_def(enable_conditionals=True)
        def from_files() -> Any:
            files, _ = fn.readers.file(files=paths, random_shuffle=True)
            decoded = fn.decoders.image(files, output_type=types.RGB)
            outputs = []
            for view in range(1 + layout.strong_views):
                pixels = fn.random_resized_crop(
                    decoded,
                    size=(side, side),
                    random_area=data.strong_scale if view else data.weak_scale,
                    random_aspect_ratio=data.crop_ratio,
                )
                pixels = fn.flip(pixels, horizontal=coin())
                outputs.append(finish(strengthen(pixels) if view else pixels))
            return tuple(outputs)

        if paths is None:
            self._padded, self._batches = work.padded(), iter(_Batches(work))
            # Image and strength of each view, in the order of `loader.Batch.views`.
            labeled, unlabeled = np.arange(layout.labeled), np.arange(layout.labeled, drawn)
            parts = [(labeled, v) for v in range(layout.labeled_views)]
            parts += [(unlabeled, v) for v in range(1 + layout.strong_views)]
            self._drawn = np.concatenate([part for part, _ in parts])
            self._strong = np.concatenate([np.full(len(part), v > 0) for part, v in parts])
        make, rows = (from_arrays, layout.rows) if paths is None else (from_files, drawn)
        with warnings.catch_warnings(record=True):  # auto_aug uses deprecated names itself
            self._pipe: Any = make(
                batch_size=rows, num_threads=work.threads, device_id=None, seed=1, exec_dynamic=True
            )
            self._pipe.build()

    def _source(self) -> tuple[np.ndarray, np.ndarray]:
        return self._padded[np.array(next(self._batches))[self._drawn]], self._strong

    def next(self) -> Tensor:
        outputs = self._pipe.run()
        views = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        return (views[0] if len(views) == 1 else torch.cat(views)).permute(0, 3, 1, 2)

    def processes(self) -> list[int]:
        return []

    def close(self) -> None:
        self._pipe = None
