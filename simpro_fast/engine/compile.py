"""torch.compile in the step: `train.compile` and what it needs."""

from __future__ import annotations

import shutil

import torch
from torch import nn

from simpro_fast.config import Config
from simpro_fast.errors import UserError

# Ours to torch's. Shapes are static in all of them.
_MODES = {
    "default": None,
    "max-autotune": "max-autotune-no-cudagraphs",
    "cuda-graphs": "reduce-overhead",
}


def require_compiler(option: str, cure: str, device: torch.device) -> None:
    """torch.compile on CPU needs a C++ compiler: say so before the first step fails.

    Raises:
        UserError: there is none.
    """
    if device.type == "cpu" and not any(shutil.which(c) for c in ("g++", "c++", "clang++")):
        raise UserError(
            f"{option} needs a C++ compiler on CPU and none is on PATH; install g++ or set {cure}"
        )


def compile_network(network: nn.Module, config: Config, device: torch.device) -> None:
    """Compile the network in place, as `train.compile` says, at its first call.

    Raises:
        UserError: there is no C++ compiler on CPU.
    """
    mode = config.train.compile
    if mode != "none":
        require_compiler(f"train.compile={mode}", "train.compile=none", device)
        network.compile(dynamic=False, mode=_MODES[mode])


def compile_method(method: nn.Module, config: Config) -> None:
    """Compile losses, pseudo-labels and counts into one graph with the loss kernels inside.

    Never a CUDA graph: its results are used after the next micro-batch has run.
    """
    if config.train.compile != "none":
        method.compile(dynamic=False, fullgraph=True)
