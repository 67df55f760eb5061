"""The kernels compile for real architectures without a GPU, without spills, with wide accesses."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
# Operation, size, dtype, options, alignment and architecture.
PSEUDO = [
    ("pseudo_label_cross_entropy", 10, "fp32", "PRIORS GRAD", 2, 90),
    ("pseudo_label_cross_entropy", 1000, "bf16", "PRIORS GRAD", 8, 90),
    ("pseudo_label_cross_entropy", 21841, "bf16", "PRIORS GRAD", 1, 90),
]
NORM = [
    ("batch_norm_act", 16, "bf16", f"{kernel} FLAG", 8, 90)
    for kernel in ("STATISTICS", "SUMS", "GRADIENT")
]
AUGMENT_STORES = {(28, "fp32", 90): 16, (32, "bf16", 80): 8, (64, "fp32", 100): 16}
"""Bytes of the widest store by side, dtype and architecture."""
AUGMENT = [("augment", side, dtype, "", 0, arch) for side, dtype, arch in AUGMENT_STORES]


def compile_and_print() -> None:
    """In a process that has imported the kernels without Triton's interpreter."""
    sys.path.insert(0, str(ROOT / "bench"))
    from kernel_report import Specialisation, compile_and_inspect

    rows = []
    for *spec, arch in (*PSEUDO, *NORM, *AUGMENT):
        row = compile_and_inspect(Specialisation(*spec), arch)
        rows.append({**asdict(row), "spills": row.spills})
    print(json.dumps([rows, parameters()]))


def parameters() -> dict[str, list[tuple[str, bool, bool, Any]]]:
    """Of every kernel: name, is a constant, may not specialise, type."""
    import triton
    from simpro_kernels import gradient, tl_utils
    from simpro_kernels.augment import triton_kernels as augment
    from simpro_kernels.batch_norm_act import triton_kernels as norm
    from simpro_kernels.pseudo_label_cross_entropy import triton_rows, triton_tiles, triton_wide

    modules = gradient, tl_utils, augment, norm, triton_rows, triton_tiles, triton_wide
    return {
        name: [
            (p.name, p.is_constexpr, bool(p.do_not_specialize), p.annotation_type)
            for p in kernel.params
        ]
        for module in modules
        for name, kernel in vars(module).items()
        if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction)
    }


@pytest.fixture(scope="module")
def compiled() -> tuple[list[dict[str, Any]], dict[str, list[tuple[str, bool, bool, Any]]]]:
    done = processes.run(compile_and_print)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, kernels = json.loads(done.stdout)
    return rows, kernels


def test_no_kernel_spills(compiled: Any) -> None:
    assert [row["spills"] for row in compiled[0]] == [0] * len((*PSEUDO, *NORM, *AUGMENT))


def test_bf16_moves_16_bytes_at_a_time(compiled: Any) -> None:
    """All loads and the store of the gradient, though 16 does not divide 1000."""
    (row,) = (row for row in compiled[0] if row["num_classes"] == 1000)
    assert row["loads"].startswith("128x") and row["stores"].startswith("128x")
    assert "16x" not in row["loads"].replace("128x", "").split()
    assert all(r["loads"].startswith("128x") for r in compiled[0] if r["op"] == "batch_norm_act")


def test_augmented_views_are_stored_wide(compiled: Any) -> None:
    rows = [row for row in compiled[0] if row["op"] == "augment"]
    assert [row["widest_store_bytes"] for row in rows] == list(AUGMENT_STORES.values())
    assert all("8x" not in row["stores"].replace("128x", "") for row in rows)


def test_a_row_in_one_warp_waits_at_no_barrier(compiled: Any) -> None:
    assert [row["barriers"] for row in compiled[0] if row["kernel"] == "row_kernel"] == [0]


def test_nothing_of_the_batch_specialises_a_kernel(compiled: Any) -> None:
    """N, strides, threshold and scales are run-time arguments, and so are all addresses.

    So a kept kernel serves every call. It gets its constants after the run-time arguments.
    """
    assert len(compiled[1]) == 11, list(compiled[1])
    for kernel, arguments in compiled[1].items():
        for name, constant, may_not, kind in arguments:
            assert constant or may_not or kind == "fp32", (kernel, name)
            assert constant or name.endswith("_ptr") or kind, (kernel, name)
        constants = [constant for _, constant, _, _ in arguments]
        assert constants == sorted(constants), kernel
        assert not {n for n, constant, _, _ in arguments if constant} & {"N", "threshold", "stride"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_no_variant_spills(arch: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "kernel_report.py"), "--arch", arch]
    # The compiler must not find the interpreter switched on.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["BENCH_RESULTS"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert ", 0 spill registers" in done.stdout
    assert f"sm_{arch}" in (tmp_path / "kernel_report.csv").read_text(encoding="utf-8")
