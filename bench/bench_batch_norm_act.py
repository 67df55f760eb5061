"""Batch norm with activation: torch's operators, eager reference, torch.compile, kernels.

    python bench/bench_batch_norm_act.py             # gate, measure, write CSV and figure
    python bench/bench_batch_norm_act.py --network   # training steps of whole networks, on the CPU
    python bench/bench_batch_norm_act.py --smoke     # does it still run (no files)

Layers of WRN-28-2 and ResNet-50 in channels_last with a leaky ReLU; in the rows of the file,
`rows` are N*H*W and `classes` channels. `--network` takes turns between the networks as they are
and the same with torch's separate layers, and times the CPU time of one thread.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from common import (
    RESULTS,
    Row,
    arguments_of,
    copy_gbps,
    fresh_compilation,
    gate,
    measure,
    report,
    save_figure,
    write_rows,
)
from simpro_kernels import batch_norm_act, dispatch
from torch import Tensor, nn
from torch.nn import functional

BENCH = "batch_norm_act"
SLOPE = 0.1
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# N, C, side: WRN-28-2 with 1,664 views; ResNet-50 with 256 of 224 px.
DEVICE_SHAPES = (
    (1664, 32, 32),
    (1664, 64, 16),
    (1664, 128, 8),
    (256, 64, 112),
    (256, 256, 56),
    (256, 2048, 7),
)
CPU_SHAPES = ((104, 32, 32), (104, 64, 16), (104, 128, 8))
SMOKE_SHAPES = ((4, 16, 8),)
UNITS = {"forward": 3, "forward+backward": 8}
"""Times x that the fused operation reads or writes."""
Norm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def of_torch(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.leaky_relu(functional.batch_norm(x, mean, var, weight, bias, True), SLOPE)


def providers(device: torch.device) -> dict[str, Norm]:
    def ours(impl: str) -> Norm:
        return lambda *tensors: batch_norm_act(
            *tensors, negative_slope=SLOPE, training=True, impl=impl
        )

    norms: dict[str, Norm] = {"torch": of_torch, "compile": dispatch.compiled(of_torch)}
    norms["eager"] = ours("eager")
    if device.type == "cuda" and dispatch.HAS_TRITON:
        norms["triton"] = ours("triton")
    return norms


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    whole = "--network" in arguments
    options = arguments_of(__doc__, [a for a in arguments if a != "--network"])
    device = options.device
    if whole:
        networks(options.seconds)
        return 0
    gate(BENCH, options)
    shapes: Sequence[tuple[int, ...]]
    shapes = DEVICE_SHAPES if device.type == "cuda" else CPU_SHAPES
    dtypes = DTYPES if device.type == "cuda" else {"fp32": torch.float32}
    if options.smoke:
        shapes, dtypes = SMOKE_SHAPES, {"fp32": torch.float32}
    shapes = options.shape or shapes
    bandwidth = copy_gbps(device)
    print(f"copy bandwidth {bandwidth:.1f} GB/s")
    rows: list[Row] = []
    for images, channels, side in shapes:
        for dtype_name, dtype in dtypes.items():
            fresh_compilation()
            x = torch.randn(images, channels, side, side, device=device).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            tensors = (x, *(torch.ones(channels, device=device) for _ in range(2)))
            learned = tuple(torch.ones(channels, device=device).requires_grad_() for _ in range(2))
            for mode, units in UNITS.items():
                for provider, norm in providers(device).items():
                    measured = measure(
                        _step(norm, (*tensors, *learned), mode),
                        device,
                        seconds=options.seconds,
                        least_bytes=units * x.numel() * x.element_size(),
                        copy=bandwidth,
                    )
                    row = Row(
                        bench=BENCH,
                        provider=provider,
                        mode=mode,
                        rows=images * side * side,
                        classes=channels,
                        views=1,
                        dtype=dtype_name,
                        mask_rate=1.0,
                        **asdict(measured),
                    )
                    report(rows, row)
            if not options.smoke:
                write_rows(RESULTS / f"kernel_{BENCH}.csv", rows)
    if not options.smoke:
        save_figure(RESULTS / f"kernel_{BENCH}_{device.type}.png", rows)
    return 0


def _step(norm: Norm, tensors: tuple[Tensor, ...], mode: str) -> Callable[[], Any]:
    x = tensors[0]
    grad = torch.randn_like(x)

    def forward() -> Tensor:
        with torch.no_grad():
            return norm(*tensors)

    def both() -> None:
        for tensor in tensors:
            tensor.grad = None
        norm(*tensors).backward(grad)

    return forward if mode == "forward" else both


class Separate(nn.Module):
    """torch's layers for a fused one."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(fused.num_features, momentum=fused.momentum)
        self.activation = nn.LeakyReLU(fused.negative_slope)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.norm(x)
        return self.activation(out if residual is None else out + residual)


def separate(model: nn.Module) -> nn.Module:
    from simpro_fast.models.layers import NormAct

    for name, child in model.named_children():
        setattr(model, name, Separate(child) if isinstance(child, NormAct) else separate(child))
    return model


def networks(seconds: float) -> None:
    """Forward and backward of whole networks on the CPU, in turns."""
    from simpro_fast.config.schema import ModelConfig
    from simpro_fast.models import build_model
    from simpro_fast.utils.malloc import reuse_freed_memory

    reuse_freed_memory()
    for name, views, side in (("small_cnn", 832, 16), ("small_cnn", 832, 28), ("wrn_28_2", 26, 32)):
        fused = build_model(ModelConfig(name=name), 10, side)
        models = {"separate": separate(copy.deepcopy(fused)), "fused": fused}
        x = torch.randn(views, 3, side, side).contiguous(memory_format=torch.channels_last)
        times: dict[str, list[float]] = {which: [] for which in models}
        for model in models.values():
            model.to(memory_format=torch.channels_last)
        deadline = time.monotonic() + 20 * seconds
        while len(times["fused"]) < 6 or time.monotonic() < deadline:
            for which, model in models.items():
                started = time.thread_time()
                model(x).square().sum().backward()
                times[which].append(1e3 * (time.thread_time() - started))
        ratios = [b / a for a, b in zip(*times.values(), strict=True)][2:]
        middle = {which: statistics.median(values[2:]) for which, values in times.items()}
        print(
            f"{name:10} {views:4} views of {side} px: separate {middle['separate']:8.1f} ms, "
            f"fused {middle['fused']:8.1f} ms, ratio {statistics.median(ratios):.3f} "
            f"(min {min(times['separate']):.1f}, {min(times['fused']):.1f}; {len(ratios)} pairs)"
        )


if __name__ == "__main__":
    sys.exit(main())
