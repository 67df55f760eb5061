"""torch.compile in the step: `train.compile` and what it needs."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import nn

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.utils.errors import UserError


def require_compiler(option: str, cure: str, device: torch.device) -> None:
    """torch.compile on CPU needs a C++ compiler: say so before the first step fails.

    Raises:
        UserError: there is none.
    """
    if device.type == "cpu" and not any(shutil.which(c) for c in ("g++", "c++", "clang++")):
        raise UserError(
            f"{option} needs a C++ compiler on CPU and none is on PATH; install g++ or set {cure}"
        )


def why_not_captured(config: Config, ranks: Ranks) -> str | None:
    """Why this run's step cannot be one CUDA graph, with the cure; None where it can."""
    if ranks.device.type != "cuda":
        return "it needs a CUDA device"
    if ranks.world_size > 1:
        return f"the collectives of {ranks.world_size} ranks are not captured"
    if config.distributed.engine != "plain":
        return "DeepSpeed's engine works on the host; set distributed.engine=plain"
    if config.micro_batches(ranks.world_size) > 1:
        return "gradients of several micro-batches add up; leave out distributed.micro_batch"
    return None


def compile_network(network: nn.Module, config: Config, ranks: Ranks) -> None:
    """Compile the network in place over static shapes, as `train.compile` says, at its first call.

    Raises:
        UserError: there is no C++ compiler on CPU.
    """
    mode = config.train.compile
    if mode != "none":
        require_compiler(f"train.compile={mode}", "train.compile=none", ranks.device)
        # The whole step is captured (step_graph.py), so torch makes no graphs of its own.
        torch_mode = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
        _compile(network, mode=torch_mode)


def compile_method(method: nn.Module, config: Config) -> None:
    """Compile losses, pseudo-labels and counts into one graph with the loss kernels inside.

    Again before each phase, of which `forward` may read the number.
    """
    if config.train.compile != "none":
        _compile(method, fullgraph=True)


def _compile(module: nn.Module, **options: Any) -> None:
    # torch keeps eight versions of a function, for all objects of its class: those of earlier
    # phases, and of earlier runs in this process, must not count.
    code = getattr(module.forward, "__code__", None)
    if code is not None:
        torch._dynamo.reset_code(code)
    module.compile(dynamic=False, **options)
