"""Pseudo-label cross-entropy: eager, torch.compile and the Triton kernel side by side.

    python bench/bench_pseudo_label_cross_entropy.py           # gate, measure, write CSV and figure
    python bench/bench_pseudo_label_cross_entropy.py --smoke   # does it still run (no files)

Two strong views, log-priors on both, soft targets; about 90 % of the images pass the threshold.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from simpro_kernels import dispatch, pseudo_label_cross_entropy
from torch import Tensor

BENCH = "pseudo_label_cross_entropy"
VIEWS = 2
THRESHOLD = 0.95
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEVICE_SHAPES = ((512, 10), (4096, 1000), (65536, 1000), (8192, 21841))
CPU_SHAPES = ((512, 10), (512, 100), (512, 1000), (64, 21841))
SMOKE_SHAPES = ((64, 10),)


@dataclass(frozen=True)
class Inputs:
    weak: Tensor
    strong: Tensor
    prior_weak: Tensor
    prior_strong: Tensor

    @property
    def mask_rate(self) -> float:
        out = pseudo_label_cross_entropy(
            self.weak, self.strong.detach(), self.prior_weak, None, THRESHOLD, impl="eager"
        )
        return float(out.mask.float().mean())


def make_inputs(images: int, classes: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    weak = normal(images, classes)
    favourite = torch.randint(classes, (images,), generator=generator, device=device)
    confident = torch.rand(images, generator=generator, device=device) < 0.9
    weak[torch.arange(images, device=device), favourite] += torch.where(confident, 25.0, 0.0)
    priors = [0.5 * normal(classes).log_softmax(0) for _ in range(2)]
    strong = normal(VIEWS * images, classes).to(dtype).requires_grad_()
    return Inputs(weak.to(dtype), strong, *priors)


def providers(device: torch.device) -> list[str]:
    names = ["eager", "compile"]
    if device.type == "cuda" and dispatch.HAS_TRITON:
        names.append("triton")
    return names


def step(inputs: Inputs, impl: str, mode: str) -> Callable[[], Any]:
    arguments = (inputs.weak, inputs.strong, inputs.prior_weak, inputs.prior_strong, THRESHOLD)

    def forward() -> Tensor:
        with torch.no_grad():
            return pseudo_label_cross_entropy(*arguments, impl=impl).loss

    def both() -> None:
        inputs.strong.grad = None
        pseudo_label_cross_entropy(*arguments, impl=impl).loss.backward()

    return forward if mode == "forward" else both


def least_bytes(inputs: Inputs, mode: str, mask_rate: float) -> int:
    """(1 + p V) N K elements read; V N K written where the gradient is wanted."""
    elements = 1 + mask_rate * VIEWS + (VIEWS if mode == "forward+backward" else 0)
    return round(elements * inputs.weak.numel()) * inputs.weak.element_size()


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
            inputs = make_inputs(images, classes, dtype, device)
            mask_rate = inputs.mask_rate
            for mode in ("forward", "forward+backward"):
                for provider in providers(device):
                    run = step(inputs, provider, mode)
                    measured = measure(
                        run,
                        device,
                        seconds=options.seconds,
                        least_bytes=least_bytes(inputs, mode, mask_rate),
                        copy=copy,
                    )
                    report(
                        rows,
                        Row(
                            bench=BENCH,
                            provider=provider,
                            mode=mode,
                            rows=images,
                            classes=classes,
                            views=VIEWS,
                            dtype=dtype_name,
                            mask_rate=round(mask_rate, 3),
                            **asdict(measured),
                        ),
                    )
            if not options.smoke:  # a run that is stopped has measured something
                write_rows(RESULTS / f"kernel_{BENCH}.csv", rows)
    if not options.smoke:
        save_figure(RESULTS / f"kernel_{BENCH}_{device.type}.png", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
