"""Images are gathered a batch at a time: no padded or re-ordered copy of the set is ever made."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_split import config, make_dataset

from simpro_fast.data.dataset import ArrayDataset
from simpro_fast.data.loader import Shapes, build_loader
from simpro_fast.data.resident import ResidentImages, reflect_pad, reflected
from simpro_fast.data.splits import Split, make_split

CPU = torch.device("cpu")
SHAPES = Shapes(labeled=3, unlabeled=5, labeled_views=2, strong_views=3)


def noise(count: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, side, side, 3)).astype(np.uint8)


def sets(own_pool: bool) -> tuple[ArrayDataset, Split]:
    """40 images in 2 classes, and perhaps an unlabeled part of 30 more."""
    dataset = replace(make_dataset([20, 20], [4, 4]), images=noise(40))
    if own_pool:
        dataset = replace(dataset, unlabeled_images=noise(30))
    return dataset, make_split(config(), dataset, seed=1)


@pytest.mark.parametrize("pad", [0, 1, 4, 7])
def test_padding_is_numpys_reflection(pad: int) -> None:
    images = noise(5)
    expected = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    assert np.array_equal(reflect_pad(images, pad), expected)
    index = reflected(8, pad)
    assert np.array_equal(images[:, index][:, :, index], expected)


@pytest.mark.parametrize("own_pool", [False, True], ids=["one pool", "own unlabeled part"])
@pytest.mark.parametrize("pad", [0, 2])
def test_views_are_those_of_a_padded_copy(own_pool: bool, pad: int) -> None:
    dataset, split = sets(own_pool)
    images = ResidentImages(dataset, split, SHAPES, pad=pad, device=CPU, resident="auto")
    rng = np.random.default_rng(0)
    for _ in range(5):
        labeled = rng.integers(0, len(split.labeled), SHAPES.labeled)
        unlabeled = rng.integers(0, len(split.unlabeled), SHAPES.unlabeled)
        padded = [
            reflect_pad(pool, pad)[rows]
            for pool, rows in (
                (dataset.images, split.labeled[labeled]),
                (dataset.unlabeled_pool, split.unlabeled[unlabeled]),
            )
        ]
        views = images.views(labeled, unlabeled)
        assert isinstance(views, np.ndarray)
        assert np.array_equal(views, np.concatenate([padded[0]] * 2 + [padded[1]] * 4))


@pytest.mark.parametrize("own_pool", [False, True], ids=["one pool", "own unlabeled part"])
def test_the_device_holds_each_used_image_once(own_pool: bool) -> None:
    """The layout of the array on the GPU, put together here on the host."""
    dataset, split = sets(own_pool)
    if not own_pool:
        split = replace(split, unlabeled=np.concatenate([split.labeled, split.unlabeled]))
    images = ResidentImages(dataset, split, SHAPES, pad=0, device=CPU, resident="auto")
    used, labeled, unlabeled = images._used()
    held = np.concatenate([dataset.images[used[0]], dataset.unlabeled_pool[used[1]]])
    assert len(held) == len(split.unlabeled) + own_pool * len(split.labeled)
    assert np.array_equal(held[labeled], dataset.images[split.labeled])
    assert np.array_equal(held[unlabeled], dataset.unlabeled_pool[split.unlabeled])


def test_images_live_until_the_pipeline_has_used_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI reads our memory without a copy, some steps later; only its own reference keeps it."""
    given: list[weakref.ref[np.ndarray]] = []
    original = ResidentImages.views

    def recording(self: ResidentImages, *rows: np.ndarray) -> Any:
        views = original(self, *rows)
        given.append(weakref.ref(views))
        return views

    monkeypatch.setattr(ResidentImages, "views", recording)
    dataset, split = sets(False)
    loader = build_loader(
        config(batch_size=4, mu=2, prefetch=3),
        dataset,
        split,
        labeled_views=2,
        strong_views=2,
        seed=1,
        rank=0,
        world_size=1,
        device=CPU,
        start_step=0,
        num_threads=1,
    )
    for step in range(6):
        loader.next(step)
        assert len(given) > step + 1, "the pipeline works ahead"
        assert all(views() is not None for views in given[step + 1 :])
    assert sum(views() is not None for views in given) <= 4, "what was used is freed"
    loader.close()


TRAIN_FROM_SPARSE = """
import resource, sys
import numpy as np, torch
from simpro_fast.config.schema import DataConfig
from simpro_fast.data.dataset import ArrayDataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.splits import make_split
side, count = 64, int(sys.argv[2])
images = np.memmap(sys.argv[1], np.uint8, "r", shape=(count, side, side, 3))
labels = np.arange(count) % 10
dataset = ArrayDataset("sparse", images, labels, tuple("abcdefghij"), images[:100], labels[:100],
                       (0.5,) * 3, (0.2,) * 3, True)
data = DataConfig(name="sparse", labeled_max=count // 100, unlabeled_max=count // 20,
                  gamma_labeled=1.0, batch_size=8, mu=4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loader = build_loader(data, dataset, make_split(data, dataset, 1), labeled_views=2, strong_views=2,
                      seed=1, rank=0, world_size=1, device=torch.device("cpu"), start_step=0,
                      num_threads=1)
for step in range(3):
    assert loader.next(step).views.shape == (2 * 8 + 3 * 32, 3, side, side)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_mapped_array_is_not_read_into_memory(tmp_path: Path) -> None:
    """Batches from a sparse file of 2 GB: the process grows by a pipeline, not by the file."""
    path, count, bytes_each = tmp_path / "sparse", 163_840, 3 * 64 * 64
    with path.open("wb") as file:
        file.truncate(count * bytes_each)
    grown_kib = subprocess.run(
        [sys.executable, "-c", TRAIN_FROM_SPARSE, str(path), str(count)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(grown_kib) / 1024 < 300, "MiB"
