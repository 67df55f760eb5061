"""The kernels beside their eager twins, torch.compile and torch's own operators.

    python bench/bench_kernels.py                          # all; writes CSV files and figures
    python bench/bench_kernels.py --op augment             # one operation
    python bench/bench_kernels.py --op batch_norm_act --shape 1664x32x32,256x256x56x1
    python bench/bench_kernels.py --smoke                  # does it still run (no files)

Every provider must give the numbers of the eager twin before it is timed. Then p20, p50 and p80 of
its calls: on a device by CUDA events, the L2 cache overwritten before each; on the CPU of one
thread. Shapes, and the columns `rows` and `classes` of bench/results/kernel_<operation>.csv:

    pseudo_label_cross_entropy  images x classes, with a third number so many spare elements after
                                each row; two strong views, 90 % of the images pass
    batch_norm_act              N x C x side, with a fourth number 1 a residual; rows are N*H*W
    augment                     side of the pictures; rows are the 1,664 views of the CIFAR recipe
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from common import RESULTS, can_draw, machine, names_of, write_table
from simpro_kernels import augment_views, batch_norm_act, dispatch, pseudo_label_cross_entropy
from torch import Tensor
from torch.nn import functional

from simpro_fast.data.augment.views import view_plan
from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.sampling.draws import Stream, augment_params

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VIEWS, THRESHOLD = 2, 0.95
SLOPE = 0.9999
"""Of the activation. It costs what any other does, and a rounding at the kink changes nothing."""
Shape = tuple[int, ...]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """An operation on inputs of one shape and dtype."""

    calls: dict[str, Callable[[], Outputs]]
    """By provider. The first output is differentiated."""
    rows: int
    classes: int
    least_bytes: dict[str, int]
    """By mode: what a fused kernel must move, each input read once, each gradient written once."""
    learned: Outputs = ()
    """Inputs that get a gradient."""
    grad: Tensor | None = None
    """The gradient that arrives at the first output; None for 1."""
    facts: dict[str, float] = field(default_factory=dict)
    """Other columns of the result."""

    def run(self, provider: str, mode: str) -> Outputs:
        """Outputs, and with `forward+backward` the gradients."""
        if not mode.startswith("forward+backward"):
            with torch.no_grad():
                return self.calls[provider]()
        outputs = self.calls[provider]()
        grads = torch.autograd.grad(outputs[0], self.learned, self.grad)
        return *(output.detach() for output in outputs), *grads


def check(found: Outputs, wanted: Outputs) -> None:
    """Each tensor within the rounding of its dtype, and of what is added up by the largest value.

    Raises:
        AssertionError: naming the place of the tensor and how far it is off.
    """
    for place, (ours, twin) in enumerate(zip(found, wanted, strict=True)):
        rtol, atol = 0.0, 0.0
        if ours.is_floating_point() and ours.numel():
            rtol, atol = (1e-4, 1e-4) if ours.dtype == torch.float32 else (2**-7, 2**-8)
            atol *= float(twin.abs().max())
        named = functools.partial("output {}: {}".format, place)
        torch.testing.assert_close(ours, twin, rtol=rtol, atol=atol, msg=named)


def providers(device: torch.device) -> list[str]:
    runs = device.type == "cuda" or dispatch.INTERPRETED
    return ["eager", "triton"] if dispatch.HAS_TRITON and runs else ["eager"]


def pseudo_labels(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    images, classes, *more = shape
    spare = sum(more)

    def rows(values: Tensor) -> Tensor:
        return functional.pad(values.to(dtype), (0, spare))[:, :classes]

    normal = functools.partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), device=device
    )
    weak = normal(images, classes)
    favourite = torch.arange(images, device=device) % classes
    weak[torch.arange(images, device=device), favourite] += torch.where(
        torch.arange(images, device=device) % 10 < 9, 25.0, 0.0
    )
    strong = rows(normal(VIEWS * images, classes)).requires_grad_()
    priors = [0.5 * normal(classes).log_softmax(0) for _ in range(2)]
    weak = rows(weak)
    loss = functools.partial(pseudo_label_cross_entropy, weak, strong, *priors, THRESHOLD)
    mask_rate = float(loss(impl="eager").mask.float().mean())
    read, size = 1 + mask_rate * VIEWS, weak.numel() * weak.element_size()
    suffix = ", spare" if spare else ""
    return Case(
        {name: functools.partial(loss, impl=name) for name in ("compile", *providers(device))},
        *(images, classes),
        {
            f"forward{suffix}": round(read * size),
            f"forward+backward{suffix}": round((read + VIEWS) * size),
        },
        (strong,),
        facts={"views": VIEWS, "mask_rate": round(mask_rate, 3)},
    )


def norms(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    images, channels, side, *more = shape
    generator = torch.Generator(device).manual_seed(0)

    def matrix() -> Tensor:
        x = torch.randn(images, channels, side, side, generator=generator, device=device)
        return x.to(dtype).contiguous(memory_format=torch.channels_last)

    vectors = [torch.full((channels,), value, device=device) for value in (0.0, 1.0, 1.1, 0.1)]
    x, residual = matrix().requires_grad_(), matrix().requires_grad_() if any(more) else None
    mean, variance, weight, bias = vectors
    learned = (x, weight.requires_grad_(), bias.requires_grad_())

    def ours(impl: str) -> Outputs:
        options: dict[str, Any] = {"residual": residual, "negative_slope": SLOPE}
        y = batch_norm_act(x, mean, variance, weight, bias, training=True, impl=impl, **options)
        return (y,)

    def of_torch() -> Outputs:
        y = functional.batch_norm(x, mean, variance, weight, bias, True)
        return (functional.leaky_relu(y if residual is None else y + residual, SLOPE),)

    suffix, added = ", residual" * any(more), int(any(more))
    size = x.numel() * x.element_size()
    return Case(
        {
            **{"torch": of_torch, "compile": dispatch.compiled(of_torch)},
            **{name: functools.partial(ours, name) for name in providers(device)},
        },
        *(images * side * side, channels),
        {
            f"forward{suffix}": (3 + added) * size,
            f"forward+backward{suffix}": (8 + 4 * added) * size,
        },
        learned if residual is None else (*learned, residual),
        matrix(),
    )


IMAGES = {Stream.AUGMENT_LABELED: (64, 2), Stream.AUGMENT_UNLABELED: (512, 3)}
"""Images and views of each in a step of the CIFAR recipe."""


def views(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    (side,) = shape
    of = AugmentConfig(side, side // 8, True, side // 2, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    plans, count = [], 0
    for stream, (images, number) in IMAGES.items():
        options: dict[str, Any] = {"start": 0, "count": images, "num_views": number, "augment": of}
        params = augment_params(1, stream, 0, **options)
        plans.append(view_plan(params, np.arange(count, count + images), of))
        count += images
    plan = torch.from_numpy(np.concatenate(plans))
    if device.type == "cuda":
        plan = plan.pin_memory()  # once; its copy to the device is timed
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (count, side, side, 3), generator=generator, dtype=torch.uint8)
    make = functools.partial(augment_views, pictures.to(device), plan, max_shift=of.max_shift)
    make = functools.partial(make, mean=of.mean, std=of.std, dtype=dtype)

    def ours(impl: str) -> Outputs:
        return (make(impl=impl),)

    # Every picture read once from memory, every view written once.
    size = pictures.numel() + len(plan) * 3 * side**2 * dtype.itemsize
    return Case(
        {name: functools.partial(ours, name) for name in providers(device)},
        *(len(plan), side),
        {"forward": size},
    )


@dataclass(frozen=True)
class Operation:
    make: Callable[[Shape, torch.dtype, torch.device], Case]
    device_shapes: tuple[Shape, ...]
    cpu_shapes: tuple[Shape, ...]
    """The first one is of --smoke."""
    tuned_shapes: tuple[Shape, ...]
    """Beside those of the device: what training meets and bench/tune_kernels.py looks at."""


OPERATIONS = {
    "pseudo_label_cross_entropy": Operation(
        pseudo_labels,
        ((512, 10), (4096, 1000), (65536, 1000), (8192, 21841), (8192, 21841, 7)),
        ((64, 10), (512, 10), (512, 100), (512, 1000), (64, 21841), (64, 21841, 7)),
        ((4096, 100), (4096, 127), (16384, 8142, 2)),
    ),
    # WRN-28-2 with 1,664 views, ResNet-50 with 256 of 224 px.
    "batch_norm_act": Operation(
        norms,
        (
            *((1664, 32, 32), (1664, 64, 16), (1664, 128, 8)),
            *((256, 64, 112), (256, 256, 56), (256, 2048, 7)),
        ),
        ((4, 16, 8), (104, 32, 32), (104, 64, 16), (104, 128, 8)),
        (
            *((1664, 16, 32), (256, 128, 28), (256, 512, 7)),
            *((256, 256, 56, 1), (256, 512, 28, 1), (256, 1024, 14, 1), (256, 2048, 7, 1)),
        ),
    ),
    "augment": Operation(views, ((16,), (28,), (32,), (64,)), ((16,), (32,)), ()),
}


def quantiles(run: Callable[[], Any], device: torch.device, seconds: float) -> list[float]:
    """p20, p50, p80 of the run time in ms: as many repetitions as fit, at least 10 on the CPU."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return list(do_bench(run, rep=round(1e3 * seconds), quantiles=[0.2, 0.5, 0.8]))
    for _ in range(3):
        run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 10 or (time.perf_counter() < deadline and len(times) < 1000):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    ordered = torch.tensor(times, dtype=torch.float64)
    return [float(ordered.quantile(q)) for q in (0.2, 0.5, 0.8)]


def copy_gbps(device: torch.device) -> float:
    """Read plus write bandwidth of a large device-to-device copy, GB/s."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    _, p50, _ = quantiles(lambda: target.copy_(source), device, seconds=1.0)
    return 2 * size / p50 / 1e6


def on_device(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Of one call: launches (copies and fills too), their time in ms, memory in MiB beyond what is
    allocated before; on the CPU None."""
    if device.type != "cuda":
        return {"peak_mib": None, "launches": None, "device_ms": None}
    torch.empty(2**28, dtype=torch.int8, device=device).zero_()  # so that L2 holds no input
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    on_it = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = [e for e in on_it if not e.is_user_annotation]  # a range spans its kernels
    return {
        "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
        "launches": len(events),
        "device_ms": round(sum(e.time_range.elapsed_us() for e in events) / 1e3, 4),
    }


def measured(
    op: str, case: Case, dtype: str, device: torch.device, seconds: float, copy: float
) -> Iterable[dict[str, Any]]:
    """A row for each mode and provider: times in ms, `gbps` the same least bytes for all."""
    for mode, least_bytes in case.least_bytes.items():
        wanted = case.run("eager", mode)
        for provider in case.calls:
            run = functools.partial(case.run, provider, mode)
            check(run(), wanted)
            p20, p50, p80 = quantiles(run, device, seconds)
            gbps = least_bytes / p50 / 1e6
            yield {
                **{"bench": op, "provider": provider, "mode": mode},
                **{"rows": case.rows, "classes": case.classes},
                **{"views": 1, "dtype": dtype, "mask_rate": 1.0, **case.facts},
                **{"p20_ms": round(p20, 4), "p50_ms": round(p50, 4), "p80_ms": round(p80, 4)},
                **{"least_bytes": least_bytes, "gbps": round(gbps, 2)},
                **{"copy_fraction": round(gbps / copy, 4), **on_device(run, device)},
            }


def save_figure(op: str, rows: list[dict[str, Any]], device: torch.device) -> None:
    """p50 with p20 to p80 of every provider, one panel per mode and dtype."""
    path = RESULTS / f"kernel_{op}_{device.type}.png"
    if not can_draw(path):
        return
    from matplotlib.figure import Figure

    bars: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        mode, _, suffix = row["mode"].partition(",")
        shape = f"{row['rows']} x {row['classes']}{suffix}"
        bars.setdefault((mode, row["dtype"], row["provider"]), {})[shape] = row
    panels = sorted({(mode, dtype) for mode, dtype, _ in bars})
    names = list(dict.fromkeys(provider for *_, provider in bars))
    shapes = list(dict.fromkeys(shape for of in bars.values() for shape in of))
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    width = 0.8 / len(names)
    for axis, panel in zip(axes, panels, strict=True):
        for index, name in enumerate(names):
            of = bars.get((*panel, name), {})
            shown, places = of.values(), [shapes.index(shape) + index * width for shape in of]
            middle = [r["p50_ms"] for r in shown]
            spread = [[r["p50_ms"] - r["p20_ms"] for r in shown]]
            spread += [[r["p80_ms"] - r["p50_ms"] for r in shown]]
            axis.bar(places, middle, width, yerr=spread, label=name)
        ticks = [i + 0.4 - width / 2 for i in range(len(shapes))]
        axis.set_xticks(ticks, shapes, rotation=20)
        axis.set_yscale("log")
        axis.set_title(", ".join(panel))
    axes[0].set_ylabel("time of a call, ms (p50; bars p20 to p80)")
    axes[0].legend(frameon=False)
    here = machine()
    figure.suptitle(f"{op}: {here['machine']}, torch {here['torch']}", fontsize=10)
    figure.savefig(path, dpi=110)


def shapes_of(text: str) -> list[Shape]:
    """An argparse type: "65536x1000,512x10"."""
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kernels, twins, torch.compile side by side.")
    parser.add_argument("--op", type=names_of(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--shape", type=shapes_of, help="only these, of one operation")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement (default 1)")
    parser.add_argument("--smoke", action="store_true", help="one small shape, nothing written")
    options = parser.parse_args(arguments)
    if options.shape and len(options.op) > 1:
        parser.error("--shape is of one operation: name it by --op")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # threads that wait for each other measure the neighbours
    seconds = 0.05 if options.smoke else options.seconds
    copy = copy_gbps(device)
    print(f"copy bandwidth {copy:.1f} GB/s")
    for op in options.op:
        known = OPERATIONS[op]
        shapes = known.device_shapes if device.type == "cuda" else known.cpu_shapes
        rows: list[dict[str, Any]] = []
        for shape in shapes[:1] if options.smoke else options.shape or shapes:
            for name, dtype in DTYPES.items():
                torch.compiler.reset()  # each shape compiles as the only one
                case = known.make(shape, dtype, device)
                for row in measured(op, case, name, device, seconds, copy):
                    print(
                        "  ".join(f"{k} {v}" for k, v in row.items() if v is not None), flush=True
                    )
                    rows.append(row)
            if not options.smoke:  # a run that is stopped has measured something
                same = ("provider", "mode", "rows", "classes", "dtype")
                write_table(RESULTS / f"kernel_{op}.csv", rows, replace=same)
        if not options.smoke:
            save_figure(op, rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
