"""The DeepSpeed engine: ZeRO stages 0 to 2 on CPU (gloo) or CUDA (NCCL).

Imported only when it is used, so that everything but training works without DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from typing import Any

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
from simpro_fast.training.engine.gradient_sync import (
    BUCKET_ELEMENTS,
    GradientAverage,
    clip_gradients,
)
from simpro_fast.training.engine.optim import build_optimizer, set_learning_rate
from simpro_fast.utils.errors import UserError


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, prepared for `device`, quiet, and without any compilation at start.

    Raises:
        UserError: it is not installed, or fails on import.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    except Exception as error:  # also one that is installed and broken
        reason = str(error) or type(error).__name__
        raise UserError(
            f"DeepSpeed cannot be imported ({reason}); run `pip install deepspeed`, "
            "or train with distributed.engine=plain"
        ) from None
    logger.setLevel(logging.ERROR)
    # Its shared-memory collective is built with a C++ compiler at first use and serves inference.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_config(config: Config, ranks: Ranks) -> dict[str, Any]:
    """The DeepSpeed dictionary, built from the one configuration."""
    micro_batches, stage = config.micro_batches(ranks.world_size), config.distributed.zero_stage
    return {
        "train_micro_batch_size_per_gpu": (
            config.data.batch_size // (ranks.world_size * micro_batches)
        ),
        "gradient_accumulation_steps": micro_batches,
        # At stage 0 clipping is ours, since DeepSpeed's is in float32.
        "gradient_clipping": (config.optim.grad_clip or 0.0) if stage else 0.0,
        "zero_optimization": {
            "stage": stage,
            # The default holds a whole small model, so that nothing could overlap.
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "overlap_comm": ranks.device.type == "cuda",
        },
        # The optimizer is torch's own on purpose: nothing to compile.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


class DeepSpeedEngine:
    """Wraps `deepspeed.initialize`; the state it saves does not depend on ranks or ZeRO stage."""

    def __init__(self, config: Config, model: nn.Module, ranks: Ranks) -> None:
        deepspeed = import_deepspeed(ranks.device)
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        self._zero_stage = config.distributed.zero_stage
        self.module = model.to(ranks.device)
        self._torch_optimizer = build_optimizer(config.optim, self.module)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=PrecisionForward(config, self.module, ranks),
            optimizer=self._torch_optimizer,
            config=deepspeed_config(config, ranks),
        )
        self._micro_batches = config.micro_batches(ranks.world_size)
        self._average: GradientAverage | None = None
        self._grad_clip = config.optim.grad_clip if self._zero_stage == 0 else None
        if self._zero_stage == 0:
            # DeepSpeed would start to communicate only after backward, and refuses float64.
            self._engine.enable_backward_allreduce = False
            if ranks.world_size > 1:
                self._average = GradientAverage(self.module.parameters(), ranks.world_size)
            # This layout breaks DeepSpeed's flattening if set earlier; ZeRO keeps weights flat.
            self.module.to(memory_format=torch.channels_last)

    def forward(self, views: Tensor) -> NetworkOutput:
        output: NetworkOutput = self._engine(views)
        return output

    def backward(self, loss: Tensor) -> None:
        last = self._engine.is_gradient_accumulation_boundary()
        if self._average is not None and last:
            self._average.begin()
        self._engine.backward(loss)  # Divides by the number of micro-batches.
        if not last:
            self._engine.step()  # Counts the micro-batch; nothing moves before the last one.

    def step(self, lr: float | Tensor) -> None:
        if self._average is not None:
            self._average.finish()
        clip_gradients(self.module, self._grad_clip)
        set_learning_rate(self._optimizer.param_groups, lr)
        self._engine.step()

    def save(self) -> EngineState:
        model = self.module.state_dict()
        if self._zero_stage == 0:
            slots = optimizer_slots(self._torch_optimizer, self.module)
        else:
            slots = self._gather_slots()
        return {"model": model, "optimizer": slots}

    def load(self, state: EngineState) -> None:
        if self._zero_stage == 0:
            load_model(self.module, state["model"])
            load_optimizer_slots(self._torch_optimizer, self.module, state["optimizer"])
            return
        self._create_slots()
        load_model(self.module, state["model"])
        self._optimizer.refresh_fp32_params()
        self._scatter_slots(state["optimizer"])

    def _link_slots(self) -> None:
        """Point every weight at its part of the sharded slots.

        DeepSpeed 0.19 does so after the step of the first parameter group only, when the later
        groups (here: the undecayed one) have no slots yet.
        """
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        for weights, shard in zip(
            self._optimizer.bit16_groups,
            self._optimizer.single_partition_of_fp32_groups,
            strict=True,
        ):
            lazy_init_hp_params_optimizer_state(weights, shard, self._torch_optimizer.state)

    def _slot_names(self) -> tuple[list[str], bool]:
        """Names of the per-weight slots of the sharded optimizer, and whether it counts steps."""
        first: dict[str, Any] = next(iter(self._torch_optimizer.state.values()), {})
        names = [k for k, v in first.items() if isinstance(v, Tensor) and v.dim() > 0]
        return names, "step" in first

    def _gather_slots(self) -> dict[str, dict[str, Any]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_slots()
        names, counts_steps = self._slot_names()
        slots: dict[str, dict[str, Any]] = {}
        for name, parameter in _trained(self.module):
            found = {slot: safe_get_full_optimizer_state(parameter, slot) for slot in names}
            slots[name] = {k: v.view(parameter.shape) for k, v in found.items() if v is not None}
            if counts_steps:
                first = next(iter(self._torch_optimizer.state.values()))
                slots[name]["step"] = first["step"]
        return slots if names else {}

    def _create_slots(self) -> None:
        """Let ZeRO allocate its sharded slots by one step that changes no weight."""
        for _ in range(self._micro_batches):
            parts = [(p * 0.0).sum() for p in self.module.parameters()]
            self.backward(torch.stack(parts).sum())
        self.step(0.0)

    def _scatter_slots(self, slots: dict[str, dict[str, Any]]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self._link_slots()
        names, counts_steps = self._slot_names()
        for name, parameter in _trained(self.module):
            saved = slots.get(name, {})
            for slot in names:
                value = saved.get(slot, torch.zeros_like(parameter))
                safe_set_full_optimizer_state(parameter, value.to(parameter.device), slot)
        if counts_steps:
            step = next(iter(slots.values()))["step"] if slots else 0
            for shard, state in self._torch_optimizer.state.items():
                state["step"] = torch.as_tensor(step).to(shard.device, copy=True)


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the optimizer holds; a frozen backbone's are not among them."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
