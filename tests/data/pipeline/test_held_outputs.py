"""Memory of a pipeline's outputs goes back when the device is done with it, and not before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline.outputs import Outputs
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.listed import listed_split
from tests.data.image_folders import tidy

GPU = torch.device("cuda", 0)


class Stream:
    """A device that does nothing of itself: `done` events have passed."""

    def __init__(self) -> None:
        self.recorded = self.done = 0

    def record_event(self) -> Event:
        self.recorded += 1
        return Event(self, self.recorded)


class Event:
    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._number <= self._stream.done

    def synchronize(self) -> None:
        self._stream.done = max(self._stream.done, self._number)


class Pipeline:
    """Gives arrays of its own, and knows which of them somebody still holds."""

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[np.ndarray]] = []

    def run(self, *stream: Any) -> list[Any]:
        array = np.full(4, len(self._arrays), np.float32)
        self._arrays.append(weakref.ref(array))
        return [Output(array)]

    def held(self) -> list[int]:
        return [n for n, array in enumerate(self._arrays) if array() is not None]


class Output:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def as_tensor(self) -> np.ndarray:
        return self._array


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def test_outputs_are_held_until_the_stream_has_passed_the_next_run(stream: Stream) -> None:
    outputs, pipe = Outputs(GPU), Pipeline()
    for step in range(4):
        (views,) = outputs.run(pipe)
        assert views.tolist() == [step] * 4
        del views  # the host is done with it, the device is not
    assert pipe.held() == [0, 1, 2, 3]
    stream.done = 2  # events of the steps 0 and 1
    outputs.run(pipe)
    assert pipe.held() == [2, 3, 4]
    stream.done = 4
    outputs.run(pipe)
    assert pipe.held() == [4, 5]  # work on step 4 is queued in front of an event that is to come
    outputs.close()
    assert pipe.held() == [] and stream.done == stream.recorded == 6
    outputs.close()


def test_failed_run_frees_nothing(stream: Stream) -> None:
    outputs, pipe = Outputs(GPU), Pipeline()
    outputs.run(pipe)
    with pytest.raises(AttributeError):
        outputs.run(None)
    assert pipe.held() == [0]


def test_on_a_cpu_nothing_is_held() -> None:
    outputs, pipe = Outputs(torch.device("cpu")), Pipeline()
    (views,) = outputs.run(pipe)
    assert pipe.held() == [0]
    del views
    assert pipe.held() == []
    outputs.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_training_that_lags_behind_sees_its_own_batches(kind: str, tmp_path: Path) -> None:
    """Each step reads its views 0.1 s after the host has let go of them and asked for the next."""
    if kind == "arrays":
        data = DataConfig(
            name="digits", labeled_max=20, unlabeled_max=40, gamma_labeled=4, test_per_class=10
        )
        dataset: Any = load_dataset(data)
        split = make_split(data, dataset, 1)
    else:
        root = tidy(tmp_path)
        folders: dict[str, Any] = {part: root / part for part in ("labeled", "unlabeled")}
        data = DataConfig(name="images", image_size=24, batch_size=8, mu=2, cutout=0, **folders)
        dataset = load_own_images(data)
        split = listed_split(data, dataset)

    def sums(wait: Callable[[], None]) -> list[float]:
        settings = LoaderSettings(data=data, device=GPU, num_threads=2)
        loader = build_loader(settings, dataset, split)
        found = []
        for step in range(20):
            batch = loader.next(step)
            torch.cuda._sleep(200_000_000)
            found.append(batch.views.double().sum())
            del batch
            wait()
        loader.close()
        return torch.stack(found).tolist()

    assert sums(lambda: None) == sums(torch.cuda.synchronize)
