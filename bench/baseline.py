"""The yardstick of all end-to-end claims: such training as it is usually written in PyTorch.

Pillow augmentation in DataLoader workers, float32, one eager forward over all views in the default
memory layout, boolean indexing of the confident rows, a loop over every tensor for the averaged
weights, numbers read back from the device at every step. Method, recipe, data, network and updates
are those of the configuration: `bench/end_to_end.py` asserts that both give the same losses and
weights from the same batch before it times anything.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pillow_policy import OPERATIONS, apply_operation, cutout
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from simpro_fast.config import Config
from simpro_fast.config.methods import SimProConfig
from simpro_fast.data.batch import AugmentConfig, Batch
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import FileImages
from simpro_fast.data.splits.split import Split
from simpro_fast.training.engine.optim import learning_rate, param_groups


class StrongPolicy:
    """RandAugment (two of 14 operations, level 1 to 9, each with probability 1/2), then cutout."""

    def __init__(self, cutout_side: int) -> None:
        self.cutout_side = cutout_side

    def __call__(self, image: Image.Image) -> Image.Image:
        for _ in range(2):
            operation, level = random.randrange(len(OPERATIONS)), random.randint(1, 9)
            if random.random() < 0.5:
                negative = random.random() < 0.5
                image = apply_operation(image, OPERATIONS[operation], level, negative)
        centre = (random.uniform(0, image.height), random.uniform(0, image.width))
        return cutout(image, centre, self.cutout_side)


class PillowViews(Dataset[Any]):
    """One weak and some strong views of an image, its label; normalised float CHW tensors."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        strong: int,
        config: Config,
        augment: AugmentConfig,
    ) -> None:
        self.images, self.labels, self.strong = images, labels, strong
        side, data = augment.image_size, config.data
        flip = [transforms.RandomHorizontalFlip()] if augment.flip else []
        finish = [transforms.ToTensor(), transforms.Normalize(augment.mean, augment.std)]
        policy = StrongPolicy(augment.cutout)
        if isinstance(images, FileImages):
            weak, strong_crop = (
                transforms.RandomResizedCrop(side, scale=scale, ratio=data.crop_ratio)
                for scale in (data.weak_scale, data.strong_scale)
            )
        else:
            weak = transforms.RandomCrop(side, padding=augment.max_shift, padding_mode="reflect")
            strong_crop = weak
        self.weak_view = transforms.Compose([*flip, weak, *finish])
        self.strong_view = transforms.Compose([*flip, strong_crop, policy, *finish])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        if isinstance(self.images, FileImages):
            with self.images.rows[index].image.open("rb") as file:
                image = Image.open(file).convert("RGB")
        else:
            image = Image.fromarray(self.images[index])
        views = [self.weak_view(image)]
        views += [self.strong_view(image) for _ in range(self.strong)]
        return views, int(self.labels[index])


class PillowLoader:
    """Endless batches of both streams; `workers` processes for the unlabeled one, one more for
    the labeled one."""

    def __init__(
        self,
        config: Config,
        dataset: ArrayDataset,
        split: Split,
        augment: AugmentConfig,
        workers: int,
    ) -> None:
        data = config.data
        truth = dataset.unlabeled_truth(split.unlabeled)
        streams = (
            (
                dataset.images,
                split.labeled,
                dataset.labels[split.labeled],
                config.labeled_views - 1,
            ),
            (dataset.unlabeled_pool, split.unlabeled, truth, config.strong_views),
        )
        sizes = (data.batch_size, data.mu * data.batch_size)
        self._streams: list[Iterator[Any]] = []
        for (pool, indices, labels, strong), size, count in zip(
            streams, sizes, (1, workers), strict=True
        ):
            images = pool.subset(indices) if isinstance(pool, FileImages) else pool[indices]
            stream = PillowViews(images, labels, strong, config, augment)
            loader = DataLoader(
                stream,
                batch_size=size,
                sampler=RandomSampler(stream, replacement=True, num_samples=10**9),
                num_workers=count,
                drop_last=True,
            )
            self._streams.append(iter(loader))

    def next(self, step: int) -> Batch:
        (labeled, targets), (unlabeled, truth) = (next(stream) for stream in self._streams)
        return Batch(step, torch.cat([*labeled, *unlabeled]), targets, truth)

    def close(self) -> None:
        self._streams.clear()


class Baseline:
    """Algorithm 1 of the SimPro paper with the released code's details, written the usual way."""

    def __init__(self, config: Config, model: nn.Module, split: Split, alpha: float) -> None:
        self.config, self.alpha = config, alpha
        self.model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
        self.ema = copy.deepcopy(self.model).eval()
        self.device = next(model.parameters()).device
        optim = config.optim
        self.optimizer = torch.optim.SGD(
            param_groups(self.model, optim.weight_decay),
            lr=optim.lr,
            momentum=optim.momentum,
            nesterov=optim.nesterov,
        )
        counts = torch.tensor(split.labeled_counts, dtype=torch.float64, device=self.device)
        self.phi = counts / counts.sum()
        self.pi_u = torch.full_like(self.phi, 1 / len(counts))
        self.counts_labeled = torch.zeros_like(counts)
        self.counts_unlabeled = torch.zeros_like(counts)
        self.losses: list[float] = []
        self.step_number = 0

    def _log(self, prior: Tensor) -> Tensor:
        assert isinstance(self.config.method, SimProConfig)
        return (prior.pow(self.config.method.tau) + 1e-12).log().float()

    def step(self, batch: Batch) -> float:
        """One update from one batch; returns the loss."""
        config, method = self.config, self.config.method
        classes, unlabeled = len(self.phi), len(batch.truth)
        views = batch.views.to(self.device).contiguous()
        targets = batch.targets.to(self.device)
        logits = self.model(views)
        labeled, weak, strong = logits.split(
            [
                config.labeled_views * len(targets),
                unlabeled,
                config.strong_views * unlabeled,
            ]
        )
        loss_labeled = F.cross_entropy(
            labeled + self._log(self.phi), targets.repeat(config.labeled_views)
        )
        pseudo_labels = torch.softmax(weak.detach() + self._log(self.pi_u), dim=1)
        max_prob, hard = pseudo_labels.max(dim=1)
        mask = max_prob >= method.threshold
        kept = mask.repeat(config.strong_views)
        log_probabilities = F.log_softmax(strong + self._log(self.phi), dim=1)
        soft = pseudo_labels.repeat(config.strong_views, 1)
        loss_unlabeled = -(soft[kept] * log_probabilities[kept]).sum() / len(kept)
        loss = self.alpha * loss_labeled + loss_unlabeled

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, self.step_number, config.train.steps)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._update_ema()

        self.counts_labeled += F.one_hot(targets, classes).sum(0)
        self.counts_unlabeled += pseudo_labels[mask].double().sum(0)
        truth = batch.truth.to(self.device)
        if mask.any():
            self.accuracy = (hard[mask] == truth[mask]).float().mean().item()
        self.losses.append(loss.item())
        self.mask_rate = mask.float().mean().item()
        self.losses_apart = loss_labeled.item(), loss_unlabeled.item()
        self.step_number += 1
        if self.step_number % config.train.period == 0:
            self._update_priors()
        return self.losses[-1]

    def _update_ema(self) -> None:
        decay = self.config.train.ema_decay
        if self.config.train.ema_warmup:
            decay = min(decay, (1 + self.step_number) / (10 + self.step_number))
        with torch.no_grad():
            averages, weights = self.ema.state_dict(), self.model.state_dict()
            learned = {name for name, _ in self.model.named_parameters()}
            for name, average in averages.items():
                if name in learned:
                    average.copy_(decay * average + (1 - decay) * weights[name])
                else:
                    average.copy_(weights[name])

    def _update_priors(self) -> None:
        momentum = self.config.method.momentum
        both = self.counts_labeled + self.counts_unlabeled
        self.pi_u = momentum * self.pi_u + (1 - momentum) * self.counts_unlabeled / (
            self.counts_unlabeled.sum() + 1
        )
        self.phi = momentum * self.phi + (1 - momentum) * both / both.sum()
        self.counts_labeled.zero_()
        self.counts_unlabeled.zero_()
