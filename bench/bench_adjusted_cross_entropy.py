"""Adjusted cross-entropy (hard labels): eager, torch.compile, Triton, and others if installed.

    python bench/bench_adjusted_cross_entropy.py           # gate, measure, write CSV and figure
    python bench/bench_adjusted_cross_entropy.py --smoke   # does it still run (no files)

"torch" is torch.nn.functional.cross_entropy on logits + log_prior. Liger's and flash-attention's
kernels know no prior, so they get the adjusted logits as well, which costs them one more pass.
"""

import importlib
import importlib.util
import sys
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
from simpro_kernels import adjusted_cross_entropy, dispatch
from torch import Tensor
from torch.nn import functional

BENCH = "adjusted_cross_entropy"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEVICE_SHAPES = ((512, 10), (4096, 1000), (65536, 1000), (8192, 21841))
CPU_SHAPES = ((128, 10), (512, 100), (512, 1000), (64, 21841))
SMOKE_SHAPES = ((64, 10),)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def providers(device: torch.device) -> dict[str, Loss]:
    """Name to loss(logits, targets, log_prior)."""

    def ours(impl: str) -> Loss:
        return lambda logits, targets, prior: adjusted_cross_entropy(
            logits, targets, prior, impl=impl
        )

    def plain(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
        return lambda logits, targets, prior: loss(logits + prior.to(logits.dtype), targets)

    losses = {
        "eager": ours("eager"),
        "compile": ours("compile"),
        "torch": plain(functional.cross_entropy),
    }
    if device.type != "cuda":
        return losses
    if dispatch.HAS_TRITON:
        losses["triton"] = ours("triton")
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers.functional")
        losses["liger"] = plain(liger.liger_cross_entropy)
    if importlib.util.find_spec("flash_attn"):
        flash = importlib.import_module("flash_attn.ops.triton.cross_entropy")
        losses["flash"] = plain(
            lambda logits, targets: flash.cross_entropy_loss(logits, targets)[0].mean()
        )
    return losses


def main(arguments: list[str] | None = None) -> int:
    options = arguments_of(__doc__, arguments)
    device = options.device
    gate(BENCH, options)
    shapes: Sequence[tuple[int, ...]]
    shapes = DEVICE_SHAPES if device.type == "cuda" else CPU_SHAPES
    dtypes = dict(DTYPES)
    if options.smoke:
        shapes, dtypes = SMOKE_SHAPES, {"fp32": torch.float32}
    shapes = options.shape or shapes
    copy = copy_gbps(device)
    print(f"copy bandwidth {copy:.1f} GB/s")
    rows: list[Row] = []
    for images, classes in shapes:
        for dtype_name, dtype in dtypes.items():
            fresh_compilation()
            generator = torch.Generator(device).manual_seed(0)
            logits = torch.randn(images, classes, generator=generator, device=device)
            logits = logits.to(dtype).requires_grad_()
            targets = torch.randint(classes, (images,), generator=generator, device=device)
            prior = torch.randn(classes, generator=generator, device=device).log_softmax(0)
            for mode in ("forward", "forward+backward"):
                size = logits.numel() * logits.element_size() * (1 if mode == "forward" else 2)
                for provider, loss in providers(device).items():
                    run = _step(loss, logits, targets, prior, mode)
                    measured = measure(
                        run, device, seconds=options.seconds, least_bytes=size, copy=copy
                    )
                    report(
                        rows,
                        Row(
                            bench=BENCH,
                            provider=provider,
                            mode=mode,
                            rows=images,
                            classes=classes,
                            views=1,
                            dtype=dtype_name,
                            mask_rate=1.0,
                            **asdict(measured),
                        ),
                    )
            if not options.smoke:  # a run that is stopped has measured something
                write_rows(RESULTS / f"kernel_{BENCH}.csv", rows)
    if not options.smoke:
        save_figure(RESULTS / f"kernel_{BENCH}_{device.type}.png", rows)
    return 0


def _step(
    loss: Loss, logits: Tensor, targets: Tensor, prior: Tensor, mode: str
) -> Callable[[], Any]:
    def forward() -> Tensor:
        with torch.no_grad():
            return loss(logits, targets, prior)

    def both() -> None:
        logits.grad = None
        loss(logits, targets, prior).backward()

    return forward if mode == "forward" else both


if __name__ == "__main__":
    sys.exit(main())
