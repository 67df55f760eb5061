"""What a method is given in a step: logits of all views, and what else it has asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch, BatchLayout
from simpro_fast.data.sampling.draws import uniforms
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.engine.base import Engine, views_dtype
from simpro_fast.methods import Method, Needs
from simpro_fast.models import MultiHead, head_of
from simpro_fast.training.view_forward import ViewForward, batch_norm_share

VIEWS = ("labeled", "weak", "strong")


class MethodInputs:
    """From a (micro-)batch to the arguments of the method, by name.

    Args:
        needs: what the method asks for.
        engine: runs the network.
        method: decides which images are confident.
        teacher: the averaged network.
        layout: of one call's batch.
        config: `train`.
        image_size: side in pixels.
    """

    def __init__(
        self,
        needs: Needs,
        engine: Engine,
        method: Method,
        teacher: nn.Module,
        layout: BatchLayout,
        config: Config,
        image_size: int,
    ) -> None:
        self._needs, self._engine, self._teacher = needs, engine, teacher
        self._rows = layout.rows_by_kind
        self._forward = ViewForward(engine, method, self._rows, config.train)
        self._bf16 = config.train.precision == "bf16"
        head = head_of(engine.module)
        self._head = head if isinstance(head, MultiHead) else None
        device = next(engine.module.parameters()).device
        image = torch.ones(1, 3, image_size, image_size, dtype=views_dtype(config), device=device)
        image = image.contiguous(memory_format=torch.channels_last)
        self._constant = [image * value for value in needs.constant_images]

    def __call__(self, batch: Batch) -> dict[str, Any]:
        needs, found = self._needs, dict[str, Any]()
        if needs.teacher:
            found |= self._teacher_features(batch.views)
        if self._constant:
            found["logits_constant"] = self._constant_logits()
        for view, output in zip(VIEWS, self._forward(batch.views), strict=True):
            found[f"logits_{view}"], features = self._parts(output)
            if view in needs.features:
                found[f"features_{view}"] = features
        for kind in needs.positions:
            found[f"{kind}_positions"] = getattr(batch, f"{kind}_positions")
        if needs.uniforms:
            found["uniform_labeled"] = batch.uniform_labeled
            found["uniform_unlabeled"] = batch.uniform_unlabeled
        if needs.head:
            found["head"] = self._head
        return {"targets": batch.targets, **found}

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        return (output, None) if self._head is None else self._head.parts(output)

    @torch.no_grad()
    def _teacher_features(self, views: Tensor) -> dict[str, Tensor | None]:
        blocks = dict(zip(VIEWS, views.split(self._rows), strict=True))
        asked = self._needs.teacher
        dtype = next(self._teacher.parameters()).dtype
        with torch.autocast(views.device.type, torch.bfloat16, enabled=self._bf16):
            output = self._teacher(torch.cat([blocks[view] for view in asked]).to(dtype))
        _, features = self._parts(output)
        assert features is not None
        parts = features.split([len(blocks[view]) for view in asked])
        return {f"teacher_{view}": part for view, part in zip(asked, parts, strict=True)}

    @torch.no_grad()
    def _constant_logits(self) -> Tensor:
        """One by one, as batch norm would mix them; their share of its statistics is none."""
        with batch_norm_share(self._engine.module, 0.0, first=True):
            return torch.cat([self._parts(self._engine.forward(x))[0] for x in self._constant])


def with_uniforms(batch: Batch, number: int, seed: int, layout: BatchLayout, ranks: Ranks) -> Batch:
    """The batch with `number` uniforms for each of its images; 0: as it is."""
    if not number:
        return batch
    drawn = []
    for kind, count in enumerate((layout.labeled, layout.unlabeled)):
        values = torch.from_numpy(
            uniforms(seed, batch.step, kind, start=ranks.rank * count, count=count, each=number)
        )
        if ranks.device.type == "cuda":
            values = values.pin_memory()
        drawn.append(values.to(ranks.device, non_blocking=True))
    return replace(batch, uniform_labeled=drawn[0], uniform_unlabeled=drawn[1])
