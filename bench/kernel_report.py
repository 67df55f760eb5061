"""Ahead-of-time report on the Triton kernels: registers, spills, shared memory, access widths.

    python bench/kernel_report.py                  # every specialisation, writes bench/results/
    python bench/kernel_report.py --smoke          # a few of them, no files

Compiles for each architecture without a GPU and reads the machine code (SASS) with the cuobjdump
that ships with Triton. Exits 1 if a kernel spills registers: local loads and stores (LDL, STL) in
the SASS or a stack frame. The LOCAL figure of cuobjdump is not used, it can be 0 beside spills.
"""

import argparse
import collections
import csv
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import RESULTS, machine
from simpro_kernels import dispatch
from simpro_kernels.launch import Launcher
from torch import Tensor

ARCHITECTURES = (80, 90, 100)
CLASSES = (10, 127, 1000, 2048, 21841)
DTYPES = ("bf16", "fp32")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PSEUDO = "pseudo_label_cross_entropy"
NORM = "batch_norm_act"
CHANNELS = (16, 128, 1024)
AUGMENT, SIDES = "augment", (16, 28, 32, 64)
BOTH = "PRIORS GRAD"


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel: what of a call is known at compile time."""

    op: str
    num_classes: int
    """K; of augment the side of the pictures."""
    dtype: str
    options: str = ""
    """Space-separated flags that are on."""
    align: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    op: str
    kernel: str
    num_classes: int
    dtype: str
    options: str
    arch: str
    align: int
    warps: int
    registers: int
    stack_bytes: int
    local_loads: int
    local_stores: int
    shared_bytes: int
    barriers: int
    loads: str
    """Global loads as width in bits x count."""
    stores: str
    widest_load_bytes: int
    widest_store_bytes: int

    @property
    def spills(self) -> bool:
        return bool(self.stack_bytes or self.local_loads or self.local_stores)


def specialisations() -> Iterator[Specialisation]:
    """What SimPro (soft targets, priors) and FixMatch (hard targets, no priors) launch."""
    from simpro_kernels.batch_norm_act.plans import KERNELS

    options = (BOTH, "PRIORS", "HARD GRAD", "HARD")
    for num_classes, dtype, flags in itertools.product(CLASSES, DTYPES, options):
        yield Specialisation(PSEUDO, num_classes, dtype, flags, gcd(8, num_classes))
    yield Specialisation(PSEUDO, 1000, "fp16", BOTH, 8)
    for dtype in DTYPES:  # a slice of columns leaves no alignment; spare elements make one
        yield Specialisation(PSEUDO, 1000, dtype, BOTH, 1)
        for num_classes in (10, 127, 1001, 21841):
            yield Specialisation(PSEUDO, num_classes, dtype, BOTH, 8)
    for side, dtype in itertools.product(SIDES, DTYPES):
        yield Specialisation(AUGMENT, side, dtype)
    for dtype in TYPES:
        yield Specialisation("gradient", 0, dtype, "IN_PLACE")
    yield Specialisation("gradient", 1000, "bf16", "IN_PLACE")
    yield Specialisation("gradient", 1000, "bf16")
    # Batch norm; FLAG stands for running statistics or for a residual.
    for kernel, flag in itertools.product(KERNELS, (" FLAG", "")):
        if kernel == "merge":  # of statistics, float32 whatever the dtype
            yield Specialisation(NORM, CHANNELS[-1], "fp32", f"MERGE{flag}", 8)
            continue
        for size, dtype in itertools.product(CHANNELS, TYPES):
            yield Specialisation(NORM, size, dtype, f"{kernel.upper()}{flag}", 8)
    yield Specialisation(NORM, 40, "bf16", "SUMS FLAG", 8)  # not a power of two
    yield Specialisation(NORM, 3, "fp32", "GRADIENT FLAG", 1)
    yield Specialisation("reduce", 0, "fp32")


SMOKE = [
    Specialisation(PSEUDO, 10, "fp32", BOTH, 2),
    Specialisation(PSEUDO, 1000, "bf16", BOTH, 8),
    Specialisation(PSEUDO, 21841, "bf16", BOTH, 1),
]
"""All code paths of the loss."""


class NoDevice:
    """Stands in for Triton's driver: kernels are compiled for an architecture that is not here."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def launched(spec: Specialisation) -> tuple[Launcher, tuple[Any, ...]]:
    """The kernel under its default plan, and the arguments that a call gives it; nothing runs."""
    seen: list[tuple[Launcher, tuple[Any, ...]]] = []

    def record(launcher: Launcher, programs: int, *arguments: Any) -> None:
        seen.append((launcher, arguments))

    with mock.patch.object(Launcher, "__call__", record):
        _call(spec)
    name = f"{spec.options.split()[0].lower()}_kernel" if spec.op == NORM else None
    return next(found for found in seen if name in (None, found[0].kernel.__name__))


def _call(spec: Specialisation) -> None:
    """Call the operation on a few rows; of a loss the mean over two views."""
    from simpro_kernels import gradient, tl_utils

    size, dtype, flags = spec.num_classes, TYPES[spec.dtype], spec.options.split()
    vector, one = torch.ones(max(size, 1)), torch.ones(())

    def matrix(rows: int) -> Tensor:
        """Rows that start at multiples of so many elements, and no more."""
        lost, spare = int(spec.align < gcd(8, size)), -size % 8 * (spec.align > gcd(8, size))
        return torch.ones(rows, size + lost + spare, dtype=dtype)[:, lost : lost + size]

    if spec.op == "gradient":
        grad = torch.ones(2, max(size, 8), dtype=dtype)
        out = grad if "IN_PLACE" in flags else torch.empty_like(grad)
        gradient._launch(grad, out, torch.ones(2) if size else one)
        return
    if spec.op == "reduce":
        tl_utils.reduce_partials(torch.ones(4), 2, 1, vector, one)
        return
    op = importlib.import_module(f"simpro_kernels.{spec.op}.launch")
    if spec.op == AUGMENT:
        images = torch.zeros(1, size, size, 3, dtype=torch.uint8)
        three = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
        op.launch(images, torch.zeros(1, 14, dtype=torch.int32), max_shift=4, dtype=dtype, **three)
    elif spec.op == NORM:
        x, flag = matrix(4), "FLAG" in flags
        running = (vector, vector) if flag else (None, None)
        gather = (lambda saved: saved[None]) if "MERGE" in flags else None
        op.forward(x, x if flag else None, vector, vector, *running, 0.1, 1e-5, 0.1, gather)
        op.backward(x, x, x, torch.ones(2 * size + 1), vector, vector, 1e-5, 0.1, flag, None)
    else:
        prior = vector if "PRIORS" in flags else None
        chosen = {"hard": "HARD" in flags, "mean": True, "with_grad": "GRAD" in flags}
        strong = matrix(4)
        op.launch(matrix(2), strong, prior, prior, one, **chosen, grad_columns=strong.stride(0))


def compile_and_inspect(spec: Specialisation, arch: int) -> Row:
    """Compile one specialisation for one architecture and read its SASS."""
    from triton.runtime import driver

    driver.set_active(NoDevice(arch))
    made, arguments = launched(spec)
    compiled = made.compile(*arguments)
    usage, sass = _disassemble(compiled.asm["cubin"])
    loads, stores = _access_widths(sass, "LDG"), _access_widths(sass, "STG")
    return Row(
        op=spec.op,
        kernel=made.kernel.__name__,
        num_classes=spec.num_classes,
        dtype=spec.dtype,
        options=spec.options,
        arch=f"sm_{arch}",
        align=spec.align,
        warps=made.plan.warps,
        registers=int(_first(r"REG:(\d+)", usage)),
        stack_bytes=int(_first(r"STACK:(\d+)", usage)),
        local_loads=len(re.findall(r"\bLDL\b", sass)),
        local_stores=len(re.findall(r"\bSTL\b", sass)),
        shared_bytes=compiled.metadata.shared,
        barriers=len(re.findall(r"\bBAR\.", sass)),
        loads=_format_widths(loads),
        stores=_format_widths(stores),
        widest_load_bytes=max(loads, default=0) // 8,
        widest_store_bytes=max(stores, default=0) // 8,
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        usage = run([_cuobjdump(), "-res-usage", file.name])
        sass = run([_cuobjdump(), "-sass", file.name])
    return usage.stdout + usage.stderr, sass.stdout


def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no {pattern!r}: {text[:200]!r}")
    return match.group(1)


def _access_widths(sass: str, opcode: str) -> dict[int, int]:
    """Width in bits to count, of one global memory opcode (32 bits where SASS names none)."""
    counts: collections.Counter[int] = collections.Counter()
    for modifiers in re.findall(rf"\b{opcode}((?:\.\w+)*)\b", sass):
        width = re.search(r"\.[US]?(8|16|64|128|256)\b", modifiers)
        counts[int(width.group(1)) if width else 32] += 1
    return dict(counts)


def _format_widths(counts: dict[int, int]) -> str:
    return " ".join(f"{width}x{counts[width]}" for width in sorted(counts, reverse=True))


def _markdown(rows: list[Row], header: str) -> str:
    names = [
        "op", "kernel", "K", "dtype", "options", "arch", "align", "warps", "registers", "spills",
        "shared B", "barriers", "loads (bits x count)", "stores (bits x count)",
    ]  # fmt: skip
    lines = [
        "# Kernel report\n",
        header,
        "\nSpills count LDL and STL in the SASS and bytes of stack. Written by "
        "`make kernel-report`.\n",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
    ]
    for row in rows:
        spills = row.stack_bytes + row.local_loads + row.local_stores
        cells = [
            row.op, row.kernel, row.num_classes or "any", row.dtype, row.options or "-", row.arch,
            row.align or "-", row.warps, row.registers, spills, row.shared_bytes,
            row.barriers, row.loads, row.stores,
        ]  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="a few kernels, no files written")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), metavar="SM")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if not dispatch.HAS_TRITON or dispatch.INTERPRETED:
        print("kernel_report: needs triton, without TRITON_INTERPRET", file=sys.stderr)
        return 2
    specs = SMOKE if options.smoke else list(specialisations())
    jobs = [(spec, arch) for spec in specs for arch in options.arch]
    # Forked workers would inherit locks of torch's threads.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(compile_and_inspect, *zip(*jobs, strict=True)))

    triton = machine()["triton"]
    header = f"triton {triton}, torch {torch.__version__}; compiled ahead of time."
    spilling = [row for row in rows if row.spills]
    if options.smoke:
        print(_markdown(rows, header))
    else:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "kernel_report.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*(f.name for f in fields(Row)), "triton"])
            writer.writeheader()
            writer.writerows({**asdict(row), "triton": triton} for row in rows)
        (RESULTS / "kernel_report.md").write_text(_markdown(rows, header), encoding="utf-8")
    for row in spilling:
        print(f"spills: {row}", file=sys.stderr)
    print(f"{len(rows)} kernels compiled, {len(spilling)} spill registers")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
