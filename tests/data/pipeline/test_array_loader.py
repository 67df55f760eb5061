"""Batches are pure functions of the configuration and the step, on any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.views import FusedViews
from simpro_fast.data.batch import AugmentConfig, Batch, BatchLayout, Loader, LoaderSettings
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.loader import build_loader, resolve_augment
from simpro_fast.data.pipeline import array_loader
from simpro_fast.data.pipeline.image_store import ImageStore
from simpro_fast.data.pipeline.synthetic_loader import SyntheticLoader
from simpro_fast.data.sampling.labeled_order import LabeledDraws
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.replay import replay_views
from tests.processes import PATIENCE

CPU = torch.device("cpu")
CONFIG = DataConfig(name="digits", batch_size=4, mu=3)


def dataset(count: int = 60, size: int = 16) -> ArrayDataset:
    """Each image's mean tells which one it is."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, size, size, 3)).astype(np.uint8)
    return ArrayDataset(
        name="noise",
        images=images,
        labels=np.arange(count) % 3,
        class_names=("a", "b", "c"),
        test_images=None,
        test_labels=None,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.3),
        flip=True,
    )


def split(labeled: int, unlabeled: int) -> Split:
    return Split(
        labeled=np.arange(labeled),
        unlabeled=np.arange(labeled, labeled + unlabeled),
        test=np.arange(0),
        labeled_counts=(1, 1, 1),
        unlabeled_counts=(1, 1, 1),
        test_counts=(0, 0, 0),
        overlap=False,
    )


Make = Callable[..., Loader]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds loaders and closes them."""
    loaders: list[Loader] = []

    def build(
        data: DataConfig = CONFIG,
        source: ArrayDataset | None = None,
        parts: Split | None = None,
        **options: Any,
    ) -> Loader:
        settings = LoaderSettings(data=data, **options)
        loader = build_loader(settings, source or dataset(), parts or split(20, 40))
        loaders.append(loader)
        return loader

    yield build
    for loader in loaders:
        loader.close()


def assert_equal(a: Batch, b: Batch) -> None:
    assert a.step == b.step
    for name in ("views", "targets", "truth"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_a_batch_is_a_function_of_the_step(make: Make) -> None:
    first, again = make(), make()
    batches = [first.next(step) for step in range(6)]
    assert batches[0].views.shape == (2 * 4 + 3 * 12, 3, 16, 16)
    assert batches[0].views.is_contiguous(memory_format=torch.channels_last)
    assert (batches[0].targets.shape, batches[0].truth.shape) == ((4,), (12,))
    for step in range(6):
        assert_equal(again.next(step), batches[step])
    resumed = make(start_step=3)
    for step in (3, 4, 5):
        assert_equal(resumed.next(step), batches[step])
    assert not torch.equal(batches[0].views, batches[1].views)
    assert not torch.equal(make(seed=2).next(0).views, batches[0].views)


@pytest.mark.parametrize(("prefetch", "num_threads"), [(1, 1), (4, 3)])
def test_prefetching_and_threads_change_nothing(
    make: Make, prefetch: int, num_threads: int
) -> None:
    usual = make()
    other = make(CONFIG.model_copy(update={"prefetch": prefetch}), num_threads=num_threads)
    for step in range(5):
        assert_equal(other.next(step), usual.next(step))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_views_made_by_several_threads_are_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    usual = make()
    expected = [usual.next(step) for step in range(4)]
    before = threads()
    monkeypatch.setattr(array_loader, "PIXELS_PER_THREAD", 1)
    shared = make(num_threads=num_threads)
    for batch in expected:
        assert_equal(shared.next(batch.step), batch)
    shared.close()
    wait_for_threads(before)


def join(batches: list[Batch], shapes: BatchLayout) -> Batch:
    """The one-rank batch from the ranks' slices."""
    sizes = [shapes.labeled] * shapes.labeled_views
    sizes += [shapes.unlabeled] * (1 + shapes.strong_views)
    by_view = zip(*(batch.views.split(sizes) for batch in batches), strict=True)
    return Batch(
        step=batches[0].step,
        views=torch.cat([torch.cat(list(ranks)) for ranks in by_view]),
        targets=torch.cat([batch.targets for batch in batches]),
        truth=torch.cat([batch.truth for batch in batches]),
    )


@pytest.mark.parametrize("sampling", ["shuffle", "square_root"])
def test_two_ranks_see_the_batch_of_one(make: Make, sampling: str) -> None:
    data = CONFIG.model_copy(update={"sampling": sampling})
    whole = make(data)
    ranks = [make(data, rank=rank, world_size=2) for rank in (0, 1)]
    for step in range(3):
        batches = [loader.next(step) for loader in ranks]
        assert_equal(join(batches, BatchLayout(2, 6, 2, 2)), whole.next(step))
        assert not torch.equal(batches[0].views, batches[1].views)


@pytest.mark.parametrize("sampling", ["shuffle", "effective_number"])
def test_counted_classes_are_those_of_the_batches(make: Make, sampling: str) -> None:
    data = CONFIG.model_copy(update={"sampling": sampling})
    loaders = [make(data, rank=rank, world_size=2, start_step=3) for rank in (0, 1)]
    targets = torch.cat([one.next(step).targets for one in loaders for step in range(3, 9)])
    draws = LabeledDraws(data, dataset().labels[:20], 3, seed=1)
    assert draws.counts(3, 9) == torch.bincount(targets, minlength=3).tolist()


def test_batches_stay_as_they_are_while_later_ones_come(make: Make) -> None:
    """The tensors share the pipeline's memory; it must not reuse what is still held."""
    loader = make()
    held = [loader.next(step) for step in range(5)]
    copies = [batch.views.clone() for batch in held]
    for step in range(5, 15):
        loader.next(step)
    for batch, copy in zip(held, copies, strict=True):
        assert torch.equal(batch.views, copy)
    loader.close()
    assert torch.equal(held[0].views, copies[0])


def test_description_replays_the_batch(make: Make) -> None:
    """From JSON back to the pixels and labels of any step, as a report of a bad loss needs it."""
    source, loader = dataset(), make()
    views = resolve_augment(CONFIG, source)
    for step in range(2):
        batch = loader.next(step)
        description = json.loads(json.dumps(loader.describe(step)))
        labeled, unlabeled = replay_views(description, source.images, source.unlabeled_pool, views)
        pixels = np.concatenate([part.reshape(-1, 16, 16, 3) for part in (labeled, unlabeled)])
        expected = (pixels / 255.0 - np.array(views.mean)) / np.array(views.std)
        np.testing.assert_allclose(
            batch.views.permute(0, 2, 3, 1).numpy(), expected, atol=3e-6, rtol=0
        )
        assert batch.targets.tolist() == source.labels[description["labeled"]].tolist()
        assert batch.truth.tolist() == source.labels[description["unlabeled"]].tolist()


def test_case_8_a_set_smaller_than_a_batch_trains(make: Make) -> None:
    loader = make(parts=split(3, 5))
    for step in range(5):
        batch = loader.next(step)
        assert batch.views.shape[0] == 44
        assert len(set(loader.describe(step)["labeled"])) == 3
        assert set(loader.describe(step)["unlabeled"]) == set(range(3, 8))


def test_case_8_more_ranks_than_images_is_one_clear_line(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"3 labeled images .* 4 ranks") as caught:
        make(parts=split(3, 30), world_size=4)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"2 unlabeled images .* 4 ranks"):
        make(parts=split(30, 2), world_size=4)
    with pytest.raises(ConfigError, match=r"batch_size=4 .* 3 ranks"):
        make(world_size=3)


def test_case_29_more_ranks_after_a_resume_still_cover_each_pass(make: Make) -> None:
    """16 images, global batch 4: 2 ranks up to step 5, then 4 ranks, equal to an unbroken run."""
    data = CONFIG.model_copy(update={"batch_size": 4, "mu": 1})
    options = {"data": data, "parts": split(20, 16)}

    def ids(step: int, world: int) -> list[int]:
        loaders = [make(**options, rank=r, world_size=world, start_step=step) for r in range(world)]
        batches = [loader.next(step) for loader in loaders]
        assert all(len(batch.truth) == 4 // world for batch in batches)
        return [i for loader in loaders for i in loader.describe(step)["unlabeled"]]

    unbroken = make(**options)
    expected = [i for step in range(8) for i in unbroken.describe(step)["unlabeled"]]
    resumed = [i for step in range(5) for i in ids(step, 2)]
    resumed += [i for step in range(5, 8) for i in ids(step, 4)]
    assert resumed == expected
    assert sorted(resumed[:16]) == sorted(resumed[16:]) == list(range(20, 36))


def test_steps_out_of_order_are_refused(make: Make) -> None:
    for loader in (
        make(start_step=5),
        SyntheticLoader(LoaderSettings(data=CONFIG, start_step=5), dataset(), None),
    ):
        with pytest.raises(ValueError, match="step 4 asked for, but step 5 is next"):
            loader.next(4)
        assert loader.next(5).step == 5


def test_a_failure_names_its_step_and_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make()
    good = array_loader.view_plan

    def broken(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 4:
            raise OSError("disk on fire")
        return good(*arguments)

    calls: list[int] = []
    monkeypatch.setattr(array_loader, "view_plan", broken)
    with pytest.raises(UserError, match=r"step 2 failed: disk on fire"):
        for step in range(4):
            loader.next(step)
    with pytest.raises(UserError, match="disk on fire"):
        loader.next(3)


def test_views_that_come_normalised_make_the_same_batches(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the images of a plan are rows of all that lie there."""

    class OnDevice(ImageStore):
        def gather(
            self, labeled_positions: np.ndarray, unlabeled_positions: np.ndarray
        ) -> tuple[Any, np.ndarray]:
            gathered, device_rows = super().gather(labeled_positions, unlabeled_positions)
            backwards = torch.cat([torch.zeros_like(gathered), gathered.flip(0)])
            return backwards, len(backwards) - 1 - device_rows

    def fused(settings: LoaderSettings, augment: AugmentConfig) -> FusedViews:
        return FusedViews(augment, settings.dtype)

    loader = make()
    batches = [loader.next(step) for step in range(4)]
    monkeypatch.setattr(array_loader, "ImageStore", OnDevice)
    monkeypatch.setattr(array_loader, "view_maker", fused)
    for dtype in (torch.float32, torch.bfloat16):
        loader = make(dtype=dtype)
        for step, batch in enumerate(batches):
            made = loader.next(step)
            assert made.views.is_contiguous(memory_format=torch.channels_last)
            assert_equal(made, replace(batch, views=batch.views.to(dtype)))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def wait_for_threads(before: int) -> None:
    """Until no more than so many are left."""
    deadline = time.monotonic() + PATIENCE
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() <= before


def test_close_leaves_no_thread(make: Make) -> None:
    make().next(0)  # whatever the first pipeline of a process starts for good
    before = threads()
    loaders = [make() for _ in range(3)]
    for loader in loaders:
        loader.next(0)
    assert threads() > before
    for loader in loaders:
        loader.close()
        loader.close()
    wait_for_threads(before)
    with pytest.raises(UserError, match="closed"):
        loaders[0].next(1)


def test_training_threads_keep_their_number() -> None:
    """In a fresh process, where torch has not settled this thread's number yet."""
    code = """
import numpy, torch
torch.set_num_threads(3)
from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.loader import build_loader
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.build import make_split
data = DataConfig(labeled_max=10, unlabeled_max=10, gamma_labeled=2.0, test_per_class=5,
                  batch_size=8, mu=2)
digits = load_dataset(data)
loader = build_loader(LoaderSettings(data=data), digits, make_split(data, digits, 1))
for step in range(3):
    loader.next(step)
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3"]


def test_resolve_views() -> None:
    source = dataset(size=32)
    usual = resolve_augment(CONFIG, source)
    assert (usual.image_size, usual.max_shift, usual.flip, usual.cutout) == (32, 4, True, 16)
    own = resolve_augment(
        CONFIG.model_copy(update={"cutout": 6, "shift": 2, "flip": False}), source
    )
    assert (own.max_shift, own.flip, own.cutout) == (2, False, 6)
    assert resolve_augment(CONFIG.model_copy(update={"cutout": 0}), source).cutout == 0
    with pytest.raises(ConfigError, match=r"data\.shift=32"):
        resolve_augment(CONFIG.model_copy(update={"shift": 32}), source)


def test_no_flip_where_the_data_set_forbids_it(make: Make) -> None:
    description = make(CONFIG.model_copy(update={"flip": False})).describe(0)
    assert not any(description["unlabeled_views"]["flip"])
    assert any(make().describe(0)["unlabeled_views"]["flip"])


def test_rank_shapes_and_synthetic_batch() -> None:
    settings = LoaderSettings(data=CONFIG, labeled_views=1, strong_views=3, world_size=2)
    shapes = BatchLayout(labeled=2, unlabeled=6, labeled_views=1, strong_views=3)
    assert settings.layout == shapes
    source = dataset(size=8)
    loader = SyntheticLoader(settings, source, None)
    batch, later = loader.next(0), loader.next(1)
    assert batch.views.shape == (2 + 4 * 6, 3, 8, 8)
    assert batch.views.is_contiguous(memory_format=torch.channels_last)
    assert batch.targets.shape == (2,)
    assert batch.truth.max() < source.num_classes
    assert torch.equal(batch.views, later.views)
    loader.close()


@pytest.mark.gpu
def test_the_gpu_loader_gives_the_cpu_views(make: Make) -> None:
    on_cpu, on_gpu = make(), make(device=torch.device("cuda", 0))
    held = []
    for step in range(6):
        a, b = on_cpu.next(step), on_gpu.next(step)
        assert b.views.is_cuda
        assert b.views.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(b.views.cpu(), a.views, atol=3e-6, rtol=0)
        assert torch.equal(b.targets.cpu(), a.targets)
        held.append((b.views, b.views.clone()))
    assert all(torch.equal(view, copy) for view, copy in held)
