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
from simpro_fast.methods import build_method, resolve_alpha
from simpro_fast.methods.base import PseudoLabelMethod
from simpro_fast.models import (
    PretrainedReport,
    build_model,
    convert_sync_batch_norm,
    load_pretrained,
)
from simpro_fast.utils.machine import cpu_cores


def build_student(
    config: Config, dataset: ArrayDataset, ranks: Ranks, *, fresh: bool
) -> tuple[nn.Module, PretrainedReport | None]:
    """The network on the ranks' device, equal on all of them, and what `model.weights` filled.

    Args:
        fresh: False leaves `model.weights` alone, since a checkpoint holds the weights itself.
    """
    model: nn.Module = build_model(
        config.model, dataset.num_classes, dataset.image_size, seed=config.seed
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


def build_method_for(config: Config, split: Split, ranks: Ranks) -> tuple[PseudoLabelMethod, float]:
    """The method with the labeled counts of the split, and its resolved `method.alpha`.

    Raises:
        UserError: `method.impl=compile` or `train.compile` on a CPU without a C++ compiler.
    """
    if config.method.impl == "compile":
        require_compiler("method.impl=compile", "method.impl=auto", ranks.device)
    sizes = len(split.labeled), len(split.unlabeled)
    alpha = resolve_alpha(config.method, *sizes, config.data.batch_size, config.data.mu)
    method = build_method(
        config.method, split.labeled_counts, alpha=alpha, strong_views=config.strong_views
    ).to(ranks.device)
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
