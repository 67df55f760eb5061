"""A frozen backbone: its features of every image, and the network that they train."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from simpro_fast.config import Config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import ImageListDataset
from simpro_fast.data.features import Description, FeatureDataset
from simpro_fast.data.loader import resolve_augment
from simpro_fast.models import (
    HeadNetwork,
    build_model,
    classifier_of,
    load_pretrained,
    weights_file,
)
from simpro_fast.models.pretrained import weights_sha256
from simpro_fast.utils.errors import ConfigError

logger = logging.getLogger(__name__)

CROP_KEYS = ("weak_scale", "strong_scale", "crop_ratio")
"""Of the section `data`: what the views of files depend on besides."""


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
    views: dict[str, Any] = {
        "shift": augment.max_shift,
        "flip": augment.flip,
        "cutout": augment.cutout,
    }
    if isinstance(dataset, ImageListDataset) and dataset.in_files:
        views |= {key: list(getattr(config.data, key)) for key in CROP_KEYS}
    return Description(
        model=config.model.name,
        weights=weights_sha256(file),
        data=data,
        image_size=dataset.image_size,
        fit=dataset.fit,
        interpolation=dataset.interpolation,
        mean=list(dataset.mean),
        std=list(dataset.std),
        views=views,
        seed=config.seed,
        weak=0,
        strong=0,
        features=0,
        length=0.0,
    )


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
