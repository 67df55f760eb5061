"""What compiles the augmentation kernel, and the launch plans worth trying.

By counting: the picture lies in the registers of a program, whose time is that of some twenty
dependent steps (loads, passages through shared memory with a barrier each), not of bytes. So what
counts is how many views a multiprocessor has in work, and eight pixels a thread fit about as many
threads as it can have. See README.md.
"""

import functools
from dataclasses import dataclass

import torch
import triton
from simpro_kernels.augment import triton_kernels
from simpro_kernels.launch import Launcher, Plan, choose_plan

OP = "augment"


@dataclass(frozen=True)
class Problem:
    """Everything that compiles another kernel."""

    height: int
    width: int
    dtype: torch.dtype
    """Of the views."""

    @property
    def pixels(self) -> int:
        """Of a picture in registers."""
        return triton.next_power_of_2(self.height * self.width)

    @property
    def key(self) -> str:
        return f"{self.pixels} {str(self.dtype).removeprefix('torch.')}"

    @property
    def constants(self) -> dict[str, int]:
        return {"HEIGHT": self.height, "WIDTH": self.width, "P": self.pixels}


def candidates(problem: Problem) -> list[Plan]:
    """Launch plans worth trying, the default first: 8 pixels a thread, or 4, or 16 of the largest.

    More pixels a thread do not fit in its registers everywhere.
    """
    warps = max(1, problem.pixels // 256)
    return [Plan(warps), Plan(warps // 2 if problem.pixels == 4096 else 2 * warps)]


def launcher(problem: Problem, device: torch.device, plan: Plan | None = None) -> Launcher:
    """Of a plan of the caller's, or of the one for this device."""
    if plan is None:
        return _chosen(problem, device)
    # Pillow's products and sums round apart.
    options = {"enable_fp_fusion": False}
    return Launcher(triton_kernels.augment_kernel, problem.constants, plan, device, options)


@functools.cache
def _chosen(problem: Problem, device: torch.device) -> Launcher:
    return launcher(problem, device, choose_plan(OP, problem, device, candidates))
