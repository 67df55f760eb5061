"""All views of a step: the eager reference and the kernel, for the batch of the CIFAR recipe.

    python bench/bench_augment.py           # compare, measure, write CSV
    python bench/bench_augment.py --smoke   # does it still run (no files)

64 labeled and 512 unlabeled images, 1,664 views, operations and levels as they are drawn in
training. Views are compared bit for bit before anything is timed. `host_ms` is until the call
returns, its device work aside; `launches` counts copies and fills too.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import RESULTS, arguments_of, copy_gbps, measure, write_table
from simpro_kernels import dispatch
from simpro_kernels.augment.op import augment_views
from torch import Tensor

from simpro_fast.data.augment.views import view_plan
from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.sampling.draws import Stream, augment_params

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIDES = (16, 28, 32, 64)
IMAGES = {Stream.AUGMENT_LABELED: (64, 2), Stream.AUGMENT_UNLABELED: (512, 3)}
"""Images and views of each in a step."""


def plan_of(augment: AugmentConfig) -> Tensor:
    """The view plan of a step, int32 [1664, 14]."""
    plans, first = [], 0
    for stream, (count, views) in IMAGES.items():
        params = augment_params(
            1, stream, 0, start=0, count=count, num_views=views, augment=augment
        )
        plans.append(view_plan(params, np.arange(first, first + count), augment))
        first += count
    return torch.from_numpy(np.concatenate(plans))


def host_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Median over 20 calls that start on an idle device."""
    times = []
    for _ in range(20):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2]


def measured_rows(
    side: int, dtype: str, device: torch.device, seconds: float, copy: float
) -> list[dict[str, Any]]:
    shape = AugmentConfig(side, side // 8, True, side // 2, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    plan = plan_of(shape)
    count = sum(count for count, _ in IMAGES.values())
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, side, side, 3), generator=generator, dtype=torch.uint8)
    images = images.to(device)
    views = functools.partial(
        augment_views,
        images,
        plan,
        max_shift=shape.max_shift,
        mean=shape.mean,
        std=shape.std,
        dtype=DTYPES[dtype],
    )
    implementations = ["eager"]
    if device.type == "cuda" and dispatch.HAS_TRITON:
        implementations.append("triton")
        if not torch.equal(views(impl="triton"), views(impl="eager")):
            sys.exit(f"{side} px, {dtype}: the kernel's views differ, nothing is reported")
    # Every image is read once from memory, every view written once.
    size = images.numel() + len(plan) * 3 * side**2 * DTYPES[dtype].itemsize
    rows = []
    for impl in implementations:
        run = functools.partial(views, impl=impl)
        found = measure(run, device, seconds=seconds, least_bytes=size, copy=copy)
        row = {"bench": "augment", "provider": impl, "side": side, "views": len(plan)}
        row |= {"dtype": dtype, "host_ms": round(host_ms(run, device), 4), **vars(found)}
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = arguments_of(__doc__, arguments, gated=False)
    copy = copy_gbps(options.device)
    print(f"copy bandwidth {copy:.1f} GB/s", flush=True)
    rows = []
    for side in SIDES[:1] if options.smoke else SIDES:
        for dtype in DTYPES:
            rows += measured_rows(side, dtype, options.device, options.seconds, copy)
    if not options.smoke:
        write_table(RESULTS / "kernel_augment.csv", rows, replace=("provider", "side", "dtype"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
