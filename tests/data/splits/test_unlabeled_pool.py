"""Sets published with an unlabeled part of their own: split, batches, truth and fingerprint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.loader import build_loader, resolve_augment
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.split import load_split, save_split
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.replay import replay_views
from tests.data.toy_split import config, make_dataset


def pooled(pool: int = 30, size: int = 8) -> ArrayDataset:
    """Labeled and test images are dark (below 100), those of the unlabeled part are bright."""
    dataset = make_dataset([6, 5, 4], test_sizes=[1, 1, 1])
    rng = np.random.default_rng(0)
    shape = (len(dataset.images), size, size, 3)
    return dataclasses.replace(
        dataset,
        images=rng.integers(0, 100, shape).astype(np.uint8),
        unlabeled_images=rng.integers(150, 256, (pool, *shape[1:])).astype(np.uint8),
        flip=True,
    )


def test_the_whole_part_is_unlabeled_and_its_truth_unknown(tmp_path: Path) -> None:
    dataset = pooled()
    split = make_split(config(), dataset, seed=1)
    assert split.labeled_counts == (4, 2, 2)
    assert split.unlabeled.tolist() == list(range(30))
    assert split.unlabeled_counts is None
    assert not split.overlap
    assert dataset.unlabeled_truth(split.unlabeled[:3]).tolist() == [-1, -1, -1]
    save_split(split, tmp_path, dataset)
    read = load_split(tmp_path)
    assert read.unlabeled_counts is None and read.hash() == split.hash()


def test_labeled_images_are_counted_alone() -> None:
    """4 labeled + 8 unlabeled would not fit a class of 4 images that holds both."""
    make_split(config(gamma_labeled=1.0), pooled(), seed=1)
    with pytest.raises(ConfigError, match=r"class 2 \(name2\): 5 labeled"):
        make_split(config(gamma_labeled=1.0, labeled_max=5), pooled(), seed=1)


def test_overlap_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.overlap=true: toy has an unlabeled part"):
        make_split(config(overlap=True), pooled(), seed=1)


def test_split_file_counts_each_part_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "lists.npz"
    np.savez(path, labeled=np.arange(15), unlabeled=np.array([0, 29]))
    split = make_split(config(split_file=path), pooled(), seed=1)
    assert split.unlabeled.tolist() == [0, 29]
    np.savez(path, labeled=np.arange(15), unlabeled=np.array([0, 30]))
    with pytest.raises(UserError, match=r"unlabeled goes from 0 to 30, but toy has 30 images"):
        make_split(config(split_file=path), pooled(), seed=1)


def test_fingerprint_sees_the_part() -> None:
    dataset = pooled()
    without = dataclasses.replace(dataset, unlabeled_images=None)
    seen = {dataset.fingerprint(), without.fingerprint()}
    assert dataset.unlabeled_images is not None
    dataset.unlabeled_images[-1, -1, -1, -1] ^= 1
    assert len(seen | {dataset.fingerprint()}) == 3


def test_batches_take_each_stream_from_its_own_images() -> None:
    dataset = dataclasses.replace(pooled(), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    split = make_split(config(), dataset, seed=1)
    data = DataConfig(name="toy", batch_size=4, mu=3, cutout=0)
    settings = LoaderSettings(data=data, labeled_views=1, strong_views=1)
    loader = build_loader(settings, dataset, split)
    try:
        batches = [loader.next(step) for step in range(3)]
        described = loader.describe(2)
    finally:
        loader.close()
    for batch in batches:
        assert batch.views[:4].max() < 100 / 255
        assert batch.views[4:16].min() >= 150 / 255
        assert batch.truth.tolist() == [-1] * 12
        assert set(batch.targets.tolist()) <= {0, 1, 2}
    labeled, unlabeled = replay_views(
        described, dataset.images, dataset.unlabeled_pool, resolve_augment(data, dataset)
    )
    for views, rows in ((labeled, slice(0, 4)), (unlabeled, slice(4, 28))):
        shown = batches[2].views[rows].permute(0, 2, 3, 1).numpy() * 255
        np.testing.assert_array_equal(np.rint(shown).astype(np.uint8), views.reshape(shown.shape))
