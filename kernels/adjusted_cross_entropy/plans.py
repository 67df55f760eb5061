"""What compiles a kernel of this operation, and the launch plans worth trying for it."""

import functools
from typing import NamedTuple

import torch
import triton
from simpro_kernels.adjusted_cross_entropy import triton_kernels
from simpro_kernels.launch import Launcher, Plan, choose_plan, resident

OP = "adjusted_cross_entropy"
MAX_TILE = 128
"""Up to this many classes a program takes several rows at a time."""
MAX_ROW = 2048
"""Up to this many classes a row is one block in registers; beyond, blocks of columns."""

REGISTERS_FOR = {4: 80, 8: 128, 16: 168, 32: 168}
"""Registers that so many columns of a row in a lane get along with, in one or two warps."""


class Problem(NamedTuple):
    """All that compiles another kernel."""

    num_classes: int
    dtype: torch.dtype
    align: int
    """Elements that divide the start and length of rows."""
    prior: bool = True
    with_grad: bool = True
    mean: bool = True
    scale_grad: bool = True
    """Whether the stored gradient has the weight of the mean in it."""

    @property
    def block(self) -> int:
        return triton.next_power_of_2(self.num_classes)

    @property
    def key(self) -> str:
        size = f"{'tile' if self.num_classes <= MAX_TILE else 'row'}-{self.block}"
        if self.num_classes > MAX_ROW:
            size = "wide"
        return f"{size}-{8 * self.dtype.itemsize}bit-align{self.align}-grad{self.with_grad:d}"


def candidates(problem: Problem) -> list[Plan]:
    """Launch plans worth trying, the default first."""
    item, block = problem.dtype.itemsize, problem.block
    if problem.num_classes > MAX_ROW:
        shapes = [(1024, 4, 128, 2), (2048, 8, 128, 2), (1024, 4, 128, 1)]
        return [
            Plan(warps, registers, resident(warps, registers), {"BLOCK": size, "UNROLL": unroll})
            for size, warps, registers, unroll in shapes
        ]
    if problem.num_classes <= MAX_TILE:
        sizes = [max(1, min(32, elements // block)) for elements in (256, 128, 512)]
        return [Plan(1, None, 8, {"ROWS": rows}) for rows in dict.fromkeys(sizes)]
    warps = max(1, block // 1024)
    if problem.align < 16 // item and block > 512:
        warps *= 2
    plans = []
    for w in (warps, 2 * warps, warps // 2):
        if 1 <= w <= block // 128 and block // (32 * w) in REGISTERS_FOR:
            limit = 128 if w >= 4 else REGISTERS_FOR[block // (32 * w)]
            plans.append(Plan(w, limit, resident(w, limit)))
    return plans


def launcher(problem: Problem, device: torch.device, plan: Plan | None = None) -> Launcher:
    """The kernel of a problem under a plan (without one: the tuned or the default)."""
    if plan is None:
        plan = choose_plan(OP, problem, device, candidates)
    constants: dict[str, int] = {
        "K": problem.num_classes,
        "HAS_PRIOR": problem.prior,
        "MEAN": problem.mean,
        "SCALE_GRAD": problem.scale_grad,
        "WITH_GRAD": problem.with_grad,
        "ALIGN": problem.align,
        "BLOCK": problem.block,
    }
    if problem.num_classes <= MAX_TILE:
        return Launcher(triton_kernels.tile_kernel, constants, plan, device)
    wide = problem.num_classes > MAX_ROW
    block = plan.constants["BLOCK"] if wide else problem.block
    lanes, vector = 32 * plan.warps, min(problem.align, 16 // problem.dtype.itemsize)
    constants |= {"LANES": lanes, "CHUNKS": max(1, block // lanes // vector)}
    kernel = triton_kernels.wide_kernel if wide else triton_kernels.row_kernel
    return Launcher(kernel, constants, plan, device)


kept_launcher = functools.cache(launcher)


@functools.cache
def count_launcher(device: torch.device) -> Launcher:
    """The kernel that finds the weight of the mean for a large batch."""
    return Launcher(triton_kernels.mean_weight_kernel, {}, Plan(warps=16), device)
