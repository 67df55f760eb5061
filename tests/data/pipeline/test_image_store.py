"""Images are gathered a batch at a time: no padded or re-ordered copy of the set is ever made."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from simpro_fast.answers.evaluation import evaluate
from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline.image_store import ImageStore
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.split import PseudoLabeled, Split
from tests import processes
from tests.data.toy_split import config, make_dataset

CPU = torch.device("cpu")


def noise(count: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, side, side, 3)).astype(np.uint8)


def sets(own_pool: bool) -> tuple[ArrayDataset, Split]:
    """40 images in 2 classes, and perhaps an unlabeled part of 30 more."""
    dataset = replace(make_dataset([20, 20], [4, 4]), images=noise(40))
    if own_pool:
        dataset = replace(dataset, unlabeled_images=noise(30))
    return dataset, make_split(config(), dataset, seed=1)


@pytest.mark.parametrize("own_pool", [False, True], ids=["one pool", "own unlabeled part"])
def test_images_are_those_of_the_index_lists(own_pool: bool) -> None:
    dataset, split = sets(own_pool)
    images = ImageStore(dataset, split, device=CPU, resident="auto")
    rng = np.random.default_rng(0)
    for _ in range(5):
        labeled = rng.integers(0, len(split.labeled), 3)
        unlabeled = rng.integers(0, len(split.unlabeled), 5)
        expected = [
            dataset.images[split.labeled[labeled]],
            dataset.unlabeled_pool[split.unlabeled[unlabeled]],
        ]
        found, rows = images.gather(labeled, unlabeled)
        assert np.array_equal(found.numpy()[rows], np.concatenate(expected))


@pytest.mark.parametrize("own_pool", [False, True], ids=["one pool", "own unlabeled part"])
def test_the_device_holds_each_used_image_once(own_pool: bool) -> None:
    """The layout of the array on the GPU, put together here on the host."""
    dataset, split = sets(own_pool)
    if not own_pool:
        split = replace(split, unlabeled=np.concatenate([split.labeled, split.unlabeled]))
    images = ImageStore(dataset, split, device=CPU, resident="auto")
    used, labeled, unlabeled = images._used()
    held = np.concatenate([dataset.images[used[0]], dataset.unlabeled_pool[used[1]]])
    assert len(held) == len(split.unlabeled) + own_pool * len(split.labeled)
    assert np.array_equal(held[labeled], dataset.images[split.labeled])
    assert np.array_equal(held[unlabeled], dataset.unlabeled_pool[split.unlabeled])


@pytest.mark.parametrize("own_pool", [False, True], ids=["one pool", "own unlabeled part"])
def test_images_that_a_method_has_labeled_come_from_the_unlabeled_pool(own_pool: bool) -> None:
    """On the host, and in the layout of the array on the GPU."""
    dataset, split = sets(own_pool)
    own, chosen = len(split.labeled), np.array([5, 2, 7])
    joined = split.with_pseudo_labeled(PseudoLabeled(chosen, np.array([1, 0, 1]), since=0))
    assert joined.targets(dataset).tolist() == [*dataset.labels[split.labeled], 1, 0, 1]
    again = joined.with_pseudo_labeled(PseudoLabeled(chosen[:1], np.array([0]), since=0))
    assert len(again.labeled) == own + 1 and again.targets(dataset)[-1] == 0
    images = ImageStore(dataset, joined, device=CPU, resident="auto")
    labeled, unlabeled = np.array([own + 1, 0, own + 2, own - 1]), np.array([3, 5])
    expected = np.concatenate(
        [
            dataset.unlabeled_pool[split.unlabeled[[2]]],
            dataset.images[split.labeled[[0]]],
            dataset.unlabeled_pool[split.unlabeled[[7]]],
            dataset.images[split.labeled[[own - 1]]],
            dataset.unlabeled_pool[split.unlabeled[unlabeled]],
        ]
    )
    found, rows = images.gather(labeled, unlabeled)
    assert np.array_equal(found.numpy()[rows], expected)
    used, of_labeled, of_unlabeled = images._used()
    held = np.concatenate([dataset.images[used[0]], dataset.unlabeled_pool[used[1]]])
    assert np.array_equal(held[np.append(of_labeled[labeled], of_unlabeled[unlabeled])], expected)


def train_from(path: Path, count: int) -> None:
    """Fingerprint, split, batches and evaluation; prints by how many KiB the process grew."""
    side = 64
    images = np.memmap(path, np.uint8, "r", shape=(count, side, side, 3))
    labels = np.arange(count) % 10
    dataset = ArrayDataset(
        name="sparse",
        images=images,
        labels=labels,
        class_names=tuple("abcdefghij"),
        test_images=images,
        test_labels=labels,
        mean=(0.5,) * 3,
        std=(0.2,) * 3,
        flip=True,
        images_sha256="0" * 64,
    )
    sizes = {"labeled_max": count // 100, "unlabeled_max": count // 20, "gamma_labeled": 1.0}
    data = DataConfig(name="sparse", batch_size=8, mu=4, **sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset.fingerprint()
    split = make_split(data, dataset, 1)
    loader = build_loader(LoaderSettings(data=data), dataset, split)
    for step in range(3):
        assert loader.next(step).views.shape == (2 * 8 + 3 * 32, 3, side, side)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    tested = np.arange(0, count, 1000)
    found = evaluate(
        net,
        select(images, tested),
        labels[tested],
        mean=dataset.mean,
        std=dataset.std,
        num_classes=10,
        device="cpu",
        batch_size=256,
    )
    assert int(found.count.sum()) == len(tested)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_a_mapped_array_is_not_read_into_memory(tmp_path: Path) -> None:
    """Of 2 GB, all of it test images: the process grows by a pipeline and what was drawn."""
    path, count, bytes_each = tmp_path / "sparse", 163_840, 3 * 64 * 64
    with path.open("wb") as file:
        file.truncate(count * bytes_each)
    done = processes.run(train_from, path, count)
    assert done.returncode == 0, done.stderr
    grown_kib = done.stdout
    assert int(grown_kib) / 1024 < 640, "MiB, a third of the file"
