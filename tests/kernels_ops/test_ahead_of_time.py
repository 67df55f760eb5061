"""The kernels compile for real architectures without a GPU, without spills, with wide accesses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# The compiler must not find the interpreter switched on.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
CELLS = {
    "kernel": 1,
    "K": 2,
    "arch": 5,
    "align": 6,
    "spills": 9,
    "barriers": 11,
    "loads": 12,
    "stores": 13,
}


@pytest.fixture(scope="module")
def report() -> list[dict[str, str]]:
    command = [sys.executable, str(ROOT / "bench" / "kernel_report.py"), "--smoke", "--arch", "90"]
    result = subprocess.run(
        [*command, "--jobs", "2"], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [{name: row[index] for name, index in CELLS.items()} for row in rows]


def test_no_kernel_spills(report: list[dict[str, str]]) -> None:
    assert [row["spills"] for row in report] == ["0"] * 3


def test_1000_classes_in_bf16_move_16_bytes_at_a_time(report: list[dict[str, str]]) -> None:
    """All loads and the store of the gradient, though 16 does not divide 1000."""
    (row,) = (row for row in report if row["K"] == "1000")
    assert row["align"] == "8"
    assert row["loads"].startswith("128x") and row["stores"].startswith("128x")
    assert "16x" not in row["loads"].replace("128x", "").split()


def test_a_row_in_one_warp_waits_at_no_barrier(report: list[dict[str, str]]) -> None:
    assert [row["barriers"] for row in report if row["kernel"] == "row_kernel"] == ["0"]


def test_nothing_of_the_batch_specialises_a_kernel() -> None:
    """N, strides, threshold and scales are run-time arguments, and so are all addresses.

    So a kept kernel serves every call. It gets its constants after the run-time arguments.
    """
    code = """
import triton
from simpro_kernels import gradient, tl_utils
from simpro_kernels.pseudo_label_cross_entropy import triton_rows, triton_tiles, triton_wide
modules = gradient, tl_utils, triton_rows, triton_tiles, triton_wide
kernels = [value for module in modules for name, value in vars(module).items()
           if name.endswith('_kernel')]
assert len(kernels) == 5, kernels
for kernel in kernels:
    assert isinstance(kernel, triton.JITFunction)
    for parameter in kernel.params:
        floating = parameter.annotation_type == 'fp32'
        assert parameter.is_constexpr or parameter.do_not_specialize or floating, parameter.name
        pointer = parameter.name.endswith('_ptr')
        assert parameter.is_constexpr or pointer or parameter.annotation_type, parameter.name
    constants = [p.name for p in kernel.params if p.is_constexpr]
    assert constants == [p.name for p in kernel.params][len(kernel.params) - len(constants):]
    assert not set(constants) & {'N', 'threshold', 'stride'}, constants
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_no_variant_spills(arch: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "kernel_report.py"), "--arch", arch]
    environment = {**ENVIRONMENT, "BENCH_RESULTS": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert ", 0 spill registers" in done.stdout
    assert f"sm_{arch}" in (tmp_path / "kernel_report.csv").read_text(encoding="utf-8")
