"""Student network and method of a run, as the configuration, the data and the ranks ask."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from simpro_fast.config import Config
from simpro_fast.data.batch import Loader
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.engine.base import views_dtype, weight_dtype
from simpro_fast.engine.compile import compile_method, require_compiler
from simpro_fast.errors import ConfigError
from simpro_fast.methods import Method, Needs, build_method, method_class, resolve_alpha
from simpro_fast.methods.registry import setting_of
from simpro_fast.models import (
    PretrainedReport,
    build_model,
    convert_sync_batch_norm,
    head_of,
    load_pretrained,
)
from simpro_fast.utils.machine import cpu_cores


def needs_of(config: Config) -> Needs:
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


def build_student(
    config: Config, dataset: ArrayDataset, ranks: Ranks, needs: Needs, *, fresh: bool
) -> tuple[nn.Module, PretrainedReport | None]:
    """The network on the ranks' device, equal on all of them, and what `model.weights` filled.

    Args:
        fresh: False leaves `model.weights` alone, since a checkpoint holds the weights itself.
    """
    model: nn.Module = build_model(
        config.model,
        dataset.num_classes,
        dataset.image_size,
        seed=config.seed,
        heads=needs.heads,
        branches=needs.branches,
        hand_on=bool(needs.features or needs.teacher or needs.head),
    )
    pretrained: PretrainedReport | None = None
    if fresh and config.model.weights is not None:
        pretrained = load_pretrained(model, config.model.weights)
        ranks.agree_on({"file of model.weights": pretrained.sha256[:12]})
    model = model.to(ranks.device, weight_dtype(config))
    if ranks.world_size > 1 and config.distributed.sync_bn is True:
        model = convert_sync_batch_norm(model)
    ranks.broadcast_module(model)
    return model, pretrained


def build_method_for(
    config: Config, split: Split, dataset: ArrayDataset, model: nn.Module, ranks: Ranks
) -> tuple[Method, float]:
    """The method with the labeled counts of the split, and its resolved `method.alpha`.

    Raises:
        UserError: `method.impl=compile` or `train.compile` on a CPU without a C++ compiler.
    """
    if config.method.impl == "compile":
        require_compiler("method.impl=compile", "method.impl=auto", ranks.device)
    sizes = len(split.labeled), len(split.unlabeled)
    alpha = resolve_alpha(config.method, *sizes, config.data.batch_size, config.data.mu)
    head = head_of(model)
    setting = setting_of(
        config,
        labeled_counts=split.labeled_counts,
        num_unlabeled=len(split.unlabeled),
        features=head.in_features if isinstance(head, nn.Linear) else 0,
        image_size=dataset.image_size,
        alpha=alpha,
    )
    method = build_method(config.method, setting).to(ranks.device)
    compile_method(method, config)
    return method, alpha


def build_loader_for(
    config: Config,
    dataset: ArrayDataset,
    split: Split,
    ranks: Ranks,
    *,
    start_step: int,
    make_loader: Callable[..., Loader],
) -> Loader:
    """This rank's loader from `start_step` on; `make_loader` has `build_loader`'s signature."""
    threads = config.train.data_threads or config.train.threads
    return make_loader(
        config.data,
        dataset,
        split,
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
