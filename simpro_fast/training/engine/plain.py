"""The engine of PyTorch alone, for benches and machines without DeepSpeed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.engine.base import (
    EngineState,
    NetworkOutput,
    PrecisionForward,
    load_model,
    load_optimizer_slots,
    optimizer_slots,
)
from simpro_fast.training.engine.gradient_sync import GradientAverage, clip_gradients
from simpro_fast.training.engine.optim import build_optimizer, set_learning_rate


class PlainEngine:
    """PyTorch alone; with several ranks gradients are averaged during backward."""

    def __init__(self, config: Config, model: nn.Module, ranks: Ranks) -> None:
        self.module = model.to(ranks.device).to(memory_format=torch.channels_last)
        self._net = PrecisionForward(config, self.module, ranks)
        self.optimizer = build_optimizer(config.optim, self.module)
        self._grad_clip = config.optim.grad_clip
        self._micro_batches = config.micro_batches(ranks.world_size)
        self._seen = 0
        self._average: GradientAverage | None = None
        if ranks.world_size > 1:
            self._average = GradientAverage(self.module.parameters(), ranks.world_size)

    def forward(self, views: Tensor) -> NetworkOutput:
        output: NetworkOutput = self._net(views)
        return output

    def backward(self, loss: Tensor) -> None:
        self._seen += 1
        if self._average is not None and self._seen == self._micro_batches:
            self._average.begin()
        (loss / self._micro_batches).backward()

    def step(self, lr: float | Tensor) -> None:
        if self._seen != self._micro_batches:
            raise RuntimeError(f"{self._seen} of {self._micro_batches} micro-batches seen")
        self._seen = 0
        if self._average is not None:
            self._average.finish()
        clip_gradients(self.module, self._grad_clip)
        set_learning_rate(self.optimizer.param_groups, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self) -> EngineState:
        slots = optimizer_slots(self.optimizer, self.module)
        return {"model": self.module.state_dict(), "optimizer": slots}

    def load(self, state: EngineState) -> None:
        load_model(self.module, state["model"])
        load_optimizer_slots(self.optimizer, self.module, state["optimizer"])
