"""Pseudo-labels of the unlabeled images, by the method of a run and its network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.predict import Chunk, classify, forward, margin_and_entropy
from simpro_fast.answers.queue import Measure, choose
from simpro_fast.answers.unlabeled import UnlabeledSet
from simpro_fast.methods.output import PseudoLabels
from simpro_fast.methods.registry import build_method, setting_of
from simpro_fast.models.head import head_of
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.parallel_map import in_order


class TrainingRule:
    """Pseudo-labels by the method of a run, as it is at the end of the training.

    Its own code is asked, with the priors of `model.json`; only the view is another one, that of
    evaluation instead of a random weak one.

    Raises:
        UserError: a method whose pseudo-labels need more than an image's logits.
    """

    def __init__(self, unlabeled: UnlabeledSet, model: TrainedModel) -> None:
        config, split, head = unlabeled.config, unlabeled.split, head_of(model.module)
        setting = setting_of(
            config,
            labeled_counts=split.labeled_counts,
            num_unlabeled=len(split.unlabeled),
            features=head.in_features if isinstance(head, nn.Linear) else 0,
            image_size=model.file.image_size,
            alpha=1.0,  # weighs losses, of which there are none here
        )
        method = build_method(config.method, setting)
        method.impl = "auto"  # the training may have had another device
        for name in ("pi_u", "phi"):
            getattr(method, name).copy_(
                torch.tensor(getattr(model.file, name), dtype=torch.float64)
            )
        self._method = method.to(model.device).eval()
        self._device = model.device
        self(np.zeros((1, len(model.class_names)), np.float32))  # whether it can, at once

    @property
    def threshold(self) -> float:
        """In probability."""
        return self._method.threshold

    def __call__(self, logits: np.ndarray) -> PseudoLabels:
        """Answer for plain logits, float32 [n, K]; tensors on the CPU."""
        found = self._method.pseudo_labels(torch.from_numpy(logits).to(self._device))
        if found is None:
            raise UserError(
                f"{type(self._method).__name__}: its pseudo-labels need more than the logits of an "
                "image; predict gives the network's answers"
            )
        return PseudoLabels(found.labels.cpu(), found.probability.cpu(), found.kept.cpu())


class Answers:
    """All unlabeled images, classified.

    Attributes (places count `UnlabeledSet.dataset_rows`):
        predicted: int64 [n], by the plain logits; -1 where the image could not be read.
        probability, margin, entropy: float32 [n], of that, by softmax(f).
        labels, confidence, kept: int64, float32 and bool [n], the pseudo-labels.
        bad: place to status of the images that could not be read.
    """

    def __init__(
        self, unlabeled: UnlabeledSet, model: TrainedModel, *, batch_size: int, threads: int
    ) -> None:
        self._set, self._model = unlabeled, model
        self._batch_size, self._threads = batch_size, threads
        count = len(unlabeled.dataset_rows)
        self.predicted, self.labels = np.full((2, count), -1, np.int64)
        self.probability, self.margin, self.entropy, self.confidence = np.zeros(
            (4, count), np.float32
        )
        self.kept = np.zeros(count, bool)
        self.bad: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.predicted)

    def fill(self, rule: TrainingRule, after: Callable[[Chunk[int]], None]) -> None:
        """Look at every image. `after` gets the chunks, whose items are places."""
        for chunk in classify(
            self._model,
            range(len(self)),
            lambda place: self._set.pixels(int(self._set.dataset_rows[place])),
            batch_size=self._batch_size,
            threads=self._threads,
        ):
            readable = chunk.readable
            good, f = np.array(chunk.items)[readable], chunk.logits[readable]
            p, found = self._model.probabilities(f), rule(f)
            self.predicted[good], self.probability[good] = p.argmax(axis=1), p.max(axis=1)
            self.margin[good], self.entropy[good] = margin_and_entropy(p)
            self.labels[good], self.kept[good] = found.labels.numpy(), found.kept.numpy()
            self.confidence[good] = found.probability.numpy()
            self.bad.update(chunk.bad)
            after(chunk)

    def queue(self, count: int, *, measure: Measure, seed: int) -> np.ndarray:
        """Places int64 [at most count] of the images to label next; see `queue`."""
        uncertainty = -self.margin if measure == "margin" else self.entropy
        readable = np.where(self.predicted >= 0, uncertainty, -np.inf)
        return choose(readable, count, seed=seed, features_of=self._features)

    def _features(self, places: np.ndarray) -> np.ndarray:
        rows = self._set.dataset_rows[places].tolist()
        squares = in_order(self._set.pixels, rows, self._threads)
        batches = iter(lambda: list(islice(squares, self._batch_size)), [])
        return features(self._model, (np.stack(batch) for batch in batches))


def features(model: TrainedModel, batches: Iterator[np.ndarray]) -> np.ndarray:
    """Return what the head of the network sees: float32 [n, D] of batches of squares."""
    found: list[Tensor] = []

    def keep(_: object, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0].detach().flatten(1).float().cpu())

    hook = head_of(model.module).register_forward_pre_hook(keep)
    try:
        for batch in batches:
            forward(model, batch)
    finally:
        hook.remove()
    return torch.cat(found).numpy()
