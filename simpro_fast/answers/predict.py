"""Logits and answers for a stream of images that does not fit into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.sources import Item
from simpro_fast.answers.writers import Columns
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.files.decode import OK, UnreadableImage
from simpro_fast.data.files.square import read_square
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.parallel_map import in_order

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk(Generic[T]):
    """Consecutive images."""

    items: list[T]
    status: list[str]
    """Status of each: `ok`, or why it could not be read, in the words of `prepare`."""
    logits: np.ndarray
    """float32 [n, K], plain; NaN where the image could not be read."""

    @property
    def readable(self) -> np.ndarray:
        """bool [n]."""
        return np.array([status == OK for status in self.status], bool)

    @property
    def bad(self) -> list[tuple[T, str]]:
        """Those that could not be read, with their status."""
        pairs = zip(self.items, self.status, strict=True)
        return [(item, status) for item, status in pairs if status != OK]


@dataclass
class Unreadable:
    """Files that could not be read."""

    counts: Counter[str] = field(default_factory=Counter)
    """By reason, the first word of their status."""
    first: str = ""
    """Path and status of the first of them."""

    def add(self, bad: Iterable[tuple[str, str]]) -> None:
        """Count paths and their status."""
        for path, status in bad:
            self.counts[status.partition(":")[0]] += 1
            self.first = self.first or f"{path}: {status}"

    @property
    def count(self) -> int:
        return self.counts.total()

    def __add__(self, other: Unreadable) -> Unreadable:
        return Unreadable(self.counts + other.counts, self.first or other.first)


def item_pixels(item: Item, square: Square) -> np.ndarray:
    """`read_square` of an item. Raises `UnreadableImage`."""
    image = item.image
    if image is None:
        raise UnreadableImage(Path(item.path), item.status)
    return read_square(image, square, item.listed)


def classify(
    model: TrainedModel,
    items: Iterable[T],
    pixels_of: Callable[[T], np.ndarray],
    *,
    batch_size: int,
    threads: int,
) -> Iterator[Chunk[T]]:
    """Read in threads, ahead of the network, and classify `batch_size` items at a time.

    A chunk's forward pass holds its readable images, so that its numbers depend on nothing outside
    it: a run that begins at a border of chunks gives the same bits.

    Args:
        pixels_of: uint8 [S, S, 3] of an item; raises `UnreadableImage`.

    Raises:
        UserError: the batch does not fit into the GPU's memory.
    """

    def look(item: T) -> tuple[T, np.ndarray | str]:
        try:
            return item, pixels_of(item)
        except UnreadableImage as error:
            return item, error.status

    looks = in_order(look, items, threads, ahead=2 * batch_size)
    try:
        while batch := list(islice(looks, batch_size)):
            status = [found if isinstance(found, str) else OK for _, found in batch]
            logits = np.full((len(batch), len(model.class_names)), np.nan, np.float32)
            places = [i for i, said in enumerate(status) if said == OK]
            if places:
                logits[places] = forward(model, np.stack([batch[i][1] for i in places]))
            yield Chunk([item for item, _ in batch], status, logits)
    finally:
        looks.close()


def forward(model: TrainedModel, pixels: np.ndarray) -> np.ndarray:
    """`TrainedModel.logits`, float32 [n, K].

    Raises:
        UserError: it does not fit into the GPU's memory.
    """
    try:
        return model.logits(pixels).numpy()
    except torch.OutOfMemoryError:
        raise UserError(
            f"{len(pixels)} images do not fit into the GPU's memory; lower --batch-size"
        ) from None


def answers(
    chunk: Chunk[Item], probabilities: np.ndarray, names: Sequence[str], top_k: int
) -> Columns:
    """The columns of predictions; empty values where an image could not be read.

    Args:
        probabilities: float64 [n, K] of the chunk.
        names: of the K classes.
        top_k: at most K.
    """
    readable = chunk.readable
    p = probabilities[readable]
    order = np.argsort(-p, axis=1, kind="stable")  # the lowest number wins a tie, as in argmax
    ranked = np.take_along_axis(p, order, axis=1)
    margin, entropy = margin_and_entropy(p)

    def spread(values: Iterable[object]) -> list[object]:
        return spread_over(readable, values)

    def numbers(values: np.ndarray) -> list[object]:
        return spread(values.astype(np.float32))

    def classes(rank: int) -> list[object]:
        return spread(names[k] for k in order[:, rank])

    return {
        "path": [item.path for item in chunk.items],
        "member": [item.member for item in chunk.items],
        "status": list(chunk.status),
        "class": classes(0),
        "class_id": spread(order[:, 0].tolist()),
        "probability": numbers(ranked[:, 0]),
        "margin": numbers(margin),
        "entropy": numbers(entropy),
        **{f"top{i + 1}": classes(i) for i in range(top_k)},
        **{f"p{i + 1}": numbers(ranked[:, i]) for i in range(top_k)},
    }


def margin_and_entropy(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first probability's lead over the second, [n], and nats, [n], of [n, K]."""
    first, second = -np.partition(-p, (0, 1), axis=1)[:, :2].T
    positive = p > 0
    return first - second, -(p * np.log(p, where=positive, out=np.zeros_like(p))).sum(axis=1)


def spread_over(places: np.ndarray, values: Iterable[object]) -> list[object]:
    """A column with the values where `places` (bool [n]) says so, None elsewhere."""
    column: list[object] = [None] * len(places)
    for place, value in zip(np.flatnonzero(places), values, strict=True):
        column[place] = value
    return column


def answer_kinds(top_k: int) -> dict[str, str]:
    """Name and kind of the columns of `answers`, as writers want them."""
    return {
        **dict.fromkeys(("path", "member", "status", "class"), "text"),
        "class_id": "integer",
        **dict.fromkeys(("probability", "margin", "entropy"), "number"),
        **{f"top{i + 1}": "text" for i in range(top_k)},
        **{f"p{i + 1}": "number" for i in range(top_k)},
    }
