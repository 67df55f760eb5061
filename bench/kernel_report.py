"""Ahead-of-time report on the Triton kernels: registers, spills, shared memory, access widths.

    python bench/kernel_report.py                  # every specialisation, writes bench/results/
    python bench/kernel_report.py --smoke          # a few of them for one architecture, no files

Compiles for each architecture without a GPU and reads the machine code (SASS) with the cuobjdump
that ships with Triton. Exits 1 if a kernel spills registers: local loads and stores (LDL, STL) in
the SASS or a stack frame. The LOCAL figure of cuobjdump is not used, it can be 0 beside spills.
"""

import argparse
import collections
import csv
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ARCHITECTURES = (80, 90, 100)
CLASSES = (10, 100, 127, 1000, 21841)
DTYPES = ("bf16", "fp32", "fp16")
_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel: what of a call is known at compile time."""

    op: str
    kernel: str
    num_classes: int
    dtype: str
    options: str
    """Space-separated constexpr flags that are on."""


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
    for num_classes, dtype in itertools.product(CLASSES, DTYPES):
        kernel = _forward_kernel(num_classes)
        for options in ("PRIORS GRAD", "HARD GRAD"):
            yield Specialisation("pseudo_label_cross_entropy", kernel, num_classes, dtype, options)
        for options in ("PRIORS GRAD", "GRAD"):
            yield Specialisation("adjusted_cross_entropy", kernel, num_classes, dtype, options)
        yield Specialisation("gradient", "scale_rows_kernel", num_classes, dtype, "")
    yield Specialisation("adjusted_cross_entropy", "mean_weight_kernel", 0, "fp32", "")
    yield Specialisation("tl_utils", "reduce_partials_kernel", 0, "fp32", "")


def smoke_specialisations() -> list[Specialisation]:
    """A small set that covers both code paths."""
    return [
        Specialisation("pseudo_label_cross_entropy", "one_block_kernel", 10, "fp32", "PRIORS GRAD"),
        Specialisation(
            "pseudo_label_cross_entropy", "one_block_kernel", 1000, "bf16", "PRIORS GRAD"
        ),
        Specialisation(
            "pseudo_label_cross_entropy", "column_blocks_kernel", 21841, "bf16", "PRIORS GRAD"
        ),
        Specialisation("adjusted_cross_entropy", "one_block_kernel", 1000, "bf16", "PRIORS GRAD"),
    ]


def _forward_kernel(num_classes: int) -> str:
    from simpro_kernels.tl_utils import MAX_ONE_BLOCK

    return "column_blocks_kernel" if num_classes > MAX_ONE_BLOCK else "one_block_kernel"


def compile_and_inspect(spec: Specialisation, arch: int) -> Row:
    """Compile one specialisation for one architecture and read its SASS."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _kernel(spec)
    constants, align, options = _constants(spec)
    signature = {
        name: "constexpr" if name in constants else _argument_type(name, spec.dtype)
        for name in kernel.arg_names
    }
    # What the launcher would find: own buffers start at multiples of 16 bytes.
    attributes = {
        (param.num,): [["tt.divisibility", 16]]
        for param in kernel.params
        if signature[param.name].startswith("*") and not param.do_not_specialize
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: constants[name] for name in kernel.arg_names if name in constants},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, sass = _disassemble(compiled.asm["cubin"])
    loads, stores = _access_widths(sass, "LDG"), _access_widths(sass, "STG")
    return Row(
        **asdict(spec),
        arch=f"sm_{arch}",
        align=align,
        warps=options["num_warps"],
        registers=int(_first(r"REG:(\d+)", usage)),
        stack_bytes=int(_first(r"STACK:(\d+)", usage)),
        local_loads=len(re.findall(r"\bLDL\b", sass)),
        local_stores=len(re.findall(r"\bSTL\b", sass)),
        shared_bytes=compiled.metadata.shared,
        loads=_format_widths(loads),
        stores=_format_widths(stores),
        widest_load_bytes=max(loads, default=0) // 8,
        widest_store_bytes=max(stores, default=0) // 8,
    )


def _kernel(spec: Specialisation) -> Any:
    import importlib

    module = spec.op if spec.op in ("gradient", "tl_utils") else f"{spec.op}.triton_kernels"
    return getattr(importlib.import_module(f"simpro_kernels.{module}"), spec.kernel)


def _constants(spec: Specialisation) -> tuple[dict[str, Any], int, dict[str, int]]:
    """constexpr values as the launchers choose them, alignment in elements, launch options."""
    from simpro_kernels.tl_utils import tile_for

    if spec.num_classes == 0:
        return {}, 0, {"num_warps": 8 if spec.kernel == "reduce_partials_kernel" else 4}
    tile = tile_for(spec.num_classes)
    align = gcd(8, spec.num_classes)
    chosen = spec.options.split()
    flags = {
        "HAS_PRIOR": "PRIORS" in chosen,
        "HAS_PRIOR_WEAK": "PRIORS" in chosen,
        "HAS_PRIOR_STRONG": "PRIORS" in chosen,
        "HARD": "HARD" in chosen,
        "WITH_GRAD": "GRAD" in chosen,
        "SCALE_GRAD": spec.dtype != "fp16",
        "PER_ROW": False,
        "IN_PLACE": True,
    }
    sizes = {"ALIGN": align, "ROWS": tile.rows, "BLOCK": tile.block}
    return {**flags, **sizes}, align, tile.launch_options


def _argument_type(name: str, dtype: str) -> str:
    if name in ("weak_ptr", "strong_ptr", "logits_ptr", "grad_ptr", "out_ptr"):
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return {"mask_ptr": "*i1", "targets_ptr": "*i64"}.get(name, "*fp32")
    return "fp32" if name in ("threshold", "loss_scale", "grad_scale") else "i32"


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
        "shared B", "loads (bits x count)", "stores (bits x count)",
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
            row.align or "-", row.warps, row.registers, spills, row.shared_bytes, row.loads,
            row.stores,
        ]  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="a few kernels, no files written")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), metavar="SM")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)

    from simpro_kernels import dispatch

    if not dispatch.HAS_TRITON or dispatch.INTERPRETED:
        print("kernel_report: needs triton, without TRITON_INTERPRET", file=sys.stderr)
        return 2
    specs = smoke_specialisations() if options.smoke else list(specialisations())
    jobs = [(spec, arch) for spec in specs for arch in options.arch]
    # Forked workers would inherit locks of torch's threads.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(compile_and_inspect, *zip(*jobs, strict=True)))

    import torch
    import triton

    header = f"triton {triton.__version__}, torch {torch.__version__}; compiled ahead of time."
    spilling = [row for row in rows if row.spills]
    if options.smoke:
        print(_markdown(rows, header))
    else:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "kernel_report.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*asdict(rows[0]), "triton"])
            writer.writeheader()
            writer.writerows({**asdict(row), "triton": triton.__version__} for row in rows)
        (RESULTS / "kernel_report.md").write_text(_markdown(rows, header), encoding="utf-8")
    for row in spilling:
        print(f"spills: {row}", file=sys.stderr)
    print(f"{len(rows)} kernels compiled, {len(spilling)} spill registers")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
