"""What one step trains with on this rank, built in its order; and what checkpoints hold of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from simpro_fast.config import Config
from simpro_fast.data.batch import BatchLayout, rank_layout
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.engine.base import Engine
from simpro_fast.engine.build import build_engine
from simpro_fast.methods import Method, Needs
from simpro_fast.models import ModelEMA, PretrainedReport, average_buffers, first_rank_buffers
from simpro_fast.training.build import build_method_for, build_student, needs_of
from simpro_fast.training.method_inputs import MethodInputs
from simpro_fast.training.phases import Labeled, Phases
from simpro_fast.training.predictor import Predictor


@dataclass(frozen=True)
class Parts:
    """Network, average, engine and method of a run, and what stands between them."""

    needs: Needs
    pretrained: PretrainedReport | None
    """What `model.weights` filled."""
    engine: Engine
    """Its `module` is the network."""
    share_buffers: Callable[[nn.Module], None] | None
    """After every step; None where batch norms are alike on all ranks without it."""
    ema: ModelEMA
    method: Method
    alpha: float
    """`method.alpha`, resolved."""
    predictor: Predictor
    layout: BatchLayout
    """Of this rank's share of a step."""
    phases: Phases
    inputs: MethodInputs

    def state(self) -> dict[str, Any]:
        """For a checkpoint, equal on all ranks; every rank calls it. Without `rank_counts`."""
        counts, method = self.method.rank_counts, self.method.state_dict()
        return {
            **self.engine.save(),
            "ema": self.ema.state_dict(),
            "method": {k: v for k, v in method.items() if k not in counts},
            **self.phases.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave; mistakes raise what the parts raise."""
        self.engine.load({"model": state["model"], "optimizer": state["optimizer"]})
        self.ema.load_state_dict(state["ema"])
        counts = {name: getattr(self.method, name) for name in self.method.rank_counts}
        self.method.load_state_dict({**counts, **state["method"]})
        self.phases.load(state)


def build_parts(
    config: Config,
    dataset: ArrayDataset,
    split: Split,
    labeled: Labeled,
    ranks: Ranks,
    *,
    fresh: bool,
) -> Parts:
    """All parts, on the ranks' device.

    Args:
        fresh: False leaves `model.weights` alone, since a checkpoint holds the weights itself.
    """
    needs = needs_of(config)
    model, pretrained = build_student(config, dataset, ranks, needs, fresh=fresh)
    ema = ModelEMA(model, config.train.ema_decay, warmup=config.train.ema_warmup)
    engine = build_engine(config, model, ranks)
    method, alpha = build_method_for(config, split, dataset, model, ranks)
    predictor = Predictor(method, ema.module)
    layout = rank_layout(
        config.data,
        labeled_views=config.labeled_views,
        strong_views=config.strong_views,
        world_size=ranks.world_size,
    )
    return Parts(
        needs=needs,
        pretrained=pretrained,
        engine=engine,
        share_buffers={"average_buffers": average_buffers, False: first_rank_buffers}.get(
            config.distributed.sync_bn
        ),
        ema=ema,
        method=method,
        alpha=alpha,
        predictor=predictor,
        layout=layout,
        phases=Phases(config, dataset, ranks, needs, method, engine, ema, predictor, labeled),
        inputs=MethodInputs(
            needs,
            engine,
            method,
            ema.module,
            layout.part(config.micro_batches(ranks.world_size)),
            config,
            dataset.image_size,
        ),
    )
