"""What compiles a kernel of this operation, and the launch plans worth trying for it."""

import functools
from typing import NamedTuple

import torch
import triton
from simpro_kernels.batch_norm_act import triton_kernels
from simpro_kernels.launch import REGISTERS, Launcher, Plan, choose_plan

OP = "batch_norm_act"
KERNELS = ("statistics", "merge", "apply", "sums", "gradient")
_MAX_BLOCK = 256
_MIN_BLOCK = 32
_SUMMED_BLOCK = 32
"""Most channels of a program that adds up rows: the more of them share the channels, the fewer
partial results has each of those that arrive last."""


class Problem(NamedTuple):
    """All that compiles another kernel."""

    kernel: str
    """One of ``KERNELS``."""
    channels: int
    dtype: torch.dtype
    align: int
    """Elements that divide the start of rows."""
    flag: bool
    """Running statistics (statistics, merge), a residual (the others)."""

    @property
    def block(self) -> int:
        """Channels of a program: a power of two that divides them where one of 32 or more does.

        Of 32 channels 16: as 32 they would leave all partial results to one program.
        """
        divides = self.channels & -self.channels
        if divides < min(_MIN_BLOCK, self.channels):
            divides = triton.next_power_of_2(self.channels)
        if not self._adds_up:
            return min(divides, _MAX_BLOCK)
        return 16 if self.channels == _SUMMED_BLOCK else min(divides, _SUMMED_BLOCK)

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.channels, self.block)

    @property
    def key(self) -> str:
        size = f"{self.kernel}-{self.block}x{self.blocks}-{8 * self.dtype.itemsize}bit"
        return f"{size}-align{self.align}-{'residual-' * (self.flag and self._is_tiled)}"[:-1]

    @property
    def _adds_up(self) -> bool:
        return self.kernel in ("statistics", "merge", "sums")

    @property
    def _is_tiled(self) -> bool:
        return self.kernel in ("apply", "sums", "gradient")


def candidates(problem: Problem) -> list[Plan]:
    """Launch plans worth trying, the default first.

    32 bytes a lane (16 elements in bfloat16) and 16 warps on a multiprocessor keep its 32 KB in
    flight; twice as much in float32 would need more registers than there are.
    """
    if problem.kernel == "merge":
        return [Plan(warps=4)]
    sums = problem.kernel in ("statistics", "sums")
    unroll = 4 if problem.kernel == "statistics" else 2
    full = 32 // problem.dtype.itemsize
    plans = []
    for warps, elements, resident, steps in (
        (4, full, 4, unroll),
        (4, full, 5, unroll),
        (8, full, 2, unroll),
        (4, full // 2, 6, unroll),
        (4, full, 4, 1),
    ):
        lanes = 32 * warps
        rows = max(1, lanes * elements // problem.block)
        constants = {"ROWS": rows}
        registers = None
        if sums:
            # Left alone, ptxas spills a value to reach the next occupancy step.
            registers = REGISTERS // (lanes * resident) // 8 * 8
            # Rows that 8 elements a lane cover: their sums stay apart until the end.
            part = min(rows, max(1, lanes * 8 // problem.block))
            constants |= {"PART": part, "UNROLL": steps}
        else:
            constants["PER"] = 2 * steps
        plans.append(Plan(warps, registers, resident, constants))
    return plans


def launcher(problem: Problem, device: torch.device) -> Launcher:
    """The kernel of a problem under the plan of this device class, or the default."""
    plan = choose_plan(OP, problem, device, candidates)
    constants: dict[str, int] = {
        "C": problem.channels,
        "BLOCK": problem.block,
        "RESIDUAL" if problem._is_tiled else "RUNNING": problem.flag,
    }
    if problem.kernel != "merge":
        constants["ALIGN"] = problem.align
    return Launcher(getattr(triton_kernels, f"{problem.kernel}_kernel"), constants, plan, device)


kept_launcher = functools.cache(launcher)
