"""The kernels compile for real architectures without a GPU, without spills, with wide accesses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The compiler must not find the interpreter switched on.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
CELLS = {
    "op": 0,
    "kernel": 1,
    "K": 2,
    "arch": 5,
    "align": 6,
    "spills": 9,
    "loads": 11,
    "stores": 12,
}


@pytest.fixture(scope="module")
def report() -> list[dict[str, str]]:
    command = [sys.executable, str(ROOT / "bench" / "kernel_report.py"), "--smoke", "--arch", "90"]
    result = subprocess.run(
        [*command, "--jobs", "2"], env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [{name: row[index] for name, index in CELLS.items()} for row in rows]


def test_no_kernel_spills(report: list[dict[str, str]]) -> None:
    assert len(report) == 4
    assert [row["spills"] for row in report] == ["0"] * 4


def test_1000_classes_in_bf16_move_16_bytes_at_a_time(report: list[dict[str, str]]) -> None:
    """All loads and the store of the gradient, though 16 does not divide 1000."""
    rows = [row for row in report if row["K"] == "1000"]
    assert len(rows) == 2
    for row in rows:
        assert row["align"] == "8"
        assert row["loads"].startswith("128x") and row["stores"].startswith("128x")
        assert "16x" not in row["loads"].replace("128x", "").split()


def test_nothing_of_the_batch_specialises_a_kernel() -> None:
    """N, V, K, strides, threshold and scales are run-time arguments, and so are the addresses."""
    code = """
import triton
from simpro_kernels import gradient
from simpro_kernels.adjusted_cross_entropy import triton_kernels as adjusted
from simpro_kernels.pseudo_label_cross_entropy import triton_kernels as pseudo
kernels = [gradient.scale_rows_kernel, adjusted.one_block_kernel, adjusted.column_blocks_kernel,
           adjusted.mean_weight_kernel, pseudo.one_block_kernel, pseudo.column_blocks_kernel]
own = {'prior_ptr', 'prior_weak_ptr', 'prior_strong_ptr', 'weight_ptr', 'row_loss_ptr', 'mask_ptr',
       'max_prob_ptr', 'partial_mass_ptr', 'partial_loss_ptr'}
for kernel in kernels:
    assert isinstance(kernel, triton.JITFunction)
    free = {p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)}
    assert free <= own | {'grad_ptr'}, (kernel, free)
    constants = {p.name for p in kernel.params if p.is_constexpr}
    assert not constants & {'N', 'V', 'R', 'B', 'K', 'threshold'}, constants
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
