"""What a run is made of before anything is trained, and what is built from that alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from simpro_fast.answers.model_file import DESCRIPTION, WEIGHTS, read_model_file
from simpro_fast.answers.prior_file import read_prior
from simpro_fast.config import Config
from simpro_fast.config.data import DataConfig, Interpolation
from simpro_fast.data.batch import BatchLayout, Loader, LoaderSettings, rank_layout
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.registry import dataset_loader
from simpro_fast.data.features import FeatureDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.environment import check_launch
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.methods import Method, Needs, build_method, method_class, resolve_alpha
from simpro_fast.methods.registry import setting_of
from simpro_fast.models import (
    HeadNetwork,
    PretrainedReport,
    adopt_parameters,
    build_model,
    classifier_of,
    convert_sync_batch_norm,
    freeze_backbone,
    give_lora,
    head_of,
    load_pretrained,
    network_maker,
    start_at_zero,
    weights_file,
    weights_preprocessing,
)
from simpro_fast.models.timm_nets import Preprocessing
from simpro_fast.run.loggers import check_packages
from simpro_fast.training.engine.base import Engine, views_dtype, weight_dtype
from simpro_fast.training.engine.compile import compile_method, require_compiler
from simpro_fast.training.engine.plain import PlainEngine
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.regular_file import no_file


@dataclass(frozen=True)
class Setup:
    """One experiment on this rank: everything that stays as it is while the run goes on."""

    config: Config
    ranks: Ranks
    dataset: ArrayDataset
    split: Split
    """As the configuration makes it; a method may label unlabeled images later, see `Trainer`."""
    normalised_by: str = "the data set's own"
    """Whose mean and standard deviation `dataset` has, in words."""
    interpolated_by: str = "the default"
    """Likewise, whose filter scales its pictures."""

    @cached_property
    def needs(self) -> Needs:
        """What the configured method asks for."""
        return method_needs(self.config)

    @cached_property
    def layout(self) -> BatchLayout:
        """Sizes of this rank's share of a step."""
        config = self.config
        return rank_layout(
            config.data,
            labeled_views=config.labeled_views,
            strong_views=config.strong_views,
            world_size=self.ranks.world_size,
        )

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step on this rank."""
        return self.config.micro_batches(self.ranks.world_size)

    @property
    def views_per_step(self) -> int:
        """Over all ranks."""
        return self.layout.rows * self.ranks.world_size

    @cached_property
    def given_prior(self) -> tuple[float, ...] | None:
        """`method.prior` as shares [K] that sum to 1.

        Raises:
            ConfigError: the file cannot be read, or classes differ.
        """
        given = getattr(self.config.method, "prior", None)
        if given is None:
            return None
        shares = _given_prior(given, self.dataset.class_names)
        return tuple(share / sum(shares) for share in shares)

    @cached_property
    def alpha(self) -> float:
        """`method.alpha`, resolved by the sizes of the whole sets and the global batch."""
        sizes = len(self.split.labeled), len(self.split.unlabeled)
        data = self.config.data
        return resolve_alpha(self.config.method, *sizes, data.batch_size, data.mu)


def check_config(config: Config) -> None:
    """Refuse what cannot be trained whatever the data are; nothing of them is read.

    Raises:
        UserError: an unknown data set, network or method, or keys that exclude each other.
    """
    check_launch(config)
    check_packages(config)
    dataset_loader(config.data.name)
    network_maker(config.model)
    method_needs(config)


def method_needs(config: Config) -> Needs:
    """What the configured method asks for.

    Raises:
        ConfigError: the method is none, or cannot be trained as `train` says.
    """
    needs = method_class(config.method).needs(config.method)
    if config.train.strong_forward == "confident" and not needs.confident:
        raise ConfigError(
            f"train.strong_forward=confident leaves out strong views that "
            f"method.name={config.method.name} looks at; set train.strong_forward=all"
        )
    return needs


def _given_prior(given: Path | tuple[float, ...], class_names: tuple[str, ...]) -> list[float]:
    if isinstance(given, Path):
        if said := no_file(given):
            raise ConfigError(f"method.prior={given}: it {said}; give a file, or shares")
        return read_prior(given, class_names)
    if len(given) != len(class_names):
        raise ConfigError(f"method.prior: {len(given)} shares for {len(class_names)} classes")
    return list(given)


def resolved_data(config: Config) -> tuple[DataConfig, str, str]:
    """The section `data` to load the set by: mean, std and interpolation as `model.weights` expect.

    What the section says itself stays. The weights' own are those of the model.json of the run that
    they are of, or timm's.

    Returns:
        the section, whose mean and std stay None where they are the set's own; whose these are, and
        whose the interpolation is, in words.
    """
    data, model = config.data, config.model
    found = weights_preprocessing(model)
    if model.weights is not None and model.weights.name == WEIGHTS:
        described = model.weights.with_name(DESCRIPTION)
        if described.is_file():
            run = read_model_file(described)
            found = Preprocessing(run.mean, run.std, run.interpolation)
    changes: dict[str, object] = {}
    unknown = " (what model.weights expect is not known)" if model.weights and not found else ""
    normalised_by, interpolated_by = f"the data set's own{unknown}", f"the default{unknown}"
    if data.mean is not None:
        normalised_by = "data.mean, data.std"
    elif found:
        changes |= {"mean": found.mean, "std": found.std}
        normalised_by = f"those of the weights of {model.name}"
    if data.interpolation is not None:
        interpolated_by = "data.interpolation"
    elif found and found.interpolation in get_args(Interpolation):
        changes["interpolation"] = found.interpolation
        interpolated_by = f"that of the weights of {model.name}"
    return data.model_copy(update=changes), normalised_by, interpolated_by


def build_student(setup: Setup, *, fresh: bool) -> tuple[nn.Module, PretrainedReport | None]:
    """The network on the ranks' device, equal on all of them, and what `model.weights` filled.

    Args:
        fresh: False leaves `model.weights` alone where a checkpoint holds all weights: where no
            backbone is frozen.
    """
    config, ranks, needs = setup.config, setup.ranks, setup.needs
    if isinstance(setup.dataset, FeatureDataset) and needs.branches:
        raise ConfigError(
            f"train.features: method.name={config.method.name} puts batch norms before the pool, "
            "which cached features come after; train without them, or another method"
        )
    model: nn.Module = build_model(
        config.model,
        setup.dataset.num_classes,
        setup.dataset.image_size,
        seed=config.seed,
        heads=needs.heads,
        branches=needs.branches,
        with_features=bool(needs.features or needs.teacher or needs.head),
    )
    pretrained: PretrainedReport | None = None
    asked = fresh or config.freezes_backbone
    if asked and (file := weights_file(config.model)) is not None:
        pretrained = load_pretrained(model, file)
        ranks.agree_on({"file of model.weights": pretrained.sha256[:12]})
        if not pretrained.head:
            start_at_zero(model)
    if rank := config.model.lora_rank:
        give_lora(model, config.model.name, rank, config.seed)
    if isinstance(setup.dataset, FeatureDataset):
        model = HeadNetwork(classifier_of(model), setup.dataset.features.scale)
    model = model.to(ranks.device, weight_dtype(config))
    if ranks.world_size > 1 and config.distributed.sync_bn is True:
        model = convert_sync_batch_norm(model)
    ranks.broadcast_module(model)
    return model, pretrained


def build_engine(config: Config, student: nn.Module, ranks: Ranks) -> Engine:
    """The engine that `distributed.engine` names. Moves the network to the ranks' device.

    The method's own parameters are part of it by now: they learn beside a frozen backbone.

    Raises:
        UserError: DeepSpeed is asked for and cannot be imported.
    """
    if config.freezes_backbone:
        freeze_backbone(student)
    if config.distributed.engine == "plain":
        return PlainEngine(config, student, ranks)
    from simpro_fast.training.engine.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, student, ranks)


def build_run_method(setup: Setup, student: nn.Module) -> Method:
    """The method with the labeled counts of the split, on the ranks' device.

    Its own parameters become part of the student, see `MethodParameters`.

    Raises:
        UserError: `method.impl=compile` or `train.compile` on a CPU without a C++ compiler.
    """
    config, split = setup.config, setup.split
    if config.method.impl == "compile":
        require_compiler("method.impl=compile", "method.impl=auto", setup.ranks.device)
    head = head_of(student)
    setting = setting_of(
        config,
        labeled_counts=split.labeled_counts,
        num_unlabeled=len(split.unlabeled),
        features=head.in_features if isinstance(head, nn.Linear) else 0,
        image_size=setup.dataset.image_size,
        alpha=setup.alpha,
        prior=setup.given_prior,
    )
    with torch.random.fork_rng(devices=[]):  # its own parameters begin alike on all ranks
        torch.default_generator.manual_seed(config.seed)
        method = build_method(config.method, setting)
    method = method.to(setup.ranks.device, weight_dtype(config))
    adopt_parameters(student, method)
    compile_method(method, config)
    return method


def build_run_loader(
    setup: Setup, split: Split, *, start_step: int, make_loader: Callable[..., Loader]
) -> Loader:
    """This rank's loader from `start_step` on; `make_loader` has `build_loader`'s signature."""
    config, ranks = setup.config, setup.ranks
    threads = config.train.data_threads or config.train.threads
    settings = LoaderSettings(
        data=config.data,
        labeled_views=config.labeled_views,
        strong_views=config.strong_views,
        seed=config.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=ranks.device,
        start_step=start_step,
        num_threads=threads or max(1, cpu_cores() // ranks.local_world_size),
        dtype=views_dtype(config),
    )
    return make_loader(settings, setup.dataset, split)
