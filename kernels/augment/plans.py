"""What compiles the augmentation kernel, and the launch plans worth trying for it.

By counting: a view's time is that of its dependent steps, not of its bytes, so what counts is how
many views a multiprocessor has in work.
"""

import functools
from typing import NamedTuple

import torch
import triton
from simpro_kernels.augment import triton_kernels
from simpro_kernels.launch import Launcher, Plan, choose_plan

OP = "augment"


class Problem(NamedTuple):
    """All that compiles another kernel."""

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
        return f"{self.pixels}-{8 * self.dtype.itemsize}bit"


def candidates(problem: Problem) -> list[Plan]:
    """Launch plans worth trying, the default first.

    4 or 8 pixels a thread; 16 or 8 of the largest picture, of which two fit on a multiprocessor
    with 128 registers a thread. Fewer registers spill somewhere.
    """
    if problem.pixels > 2048:
        return [Plan(8, registers=128), Plan(16)]
    warps = max(1, problem.pixels // 256)
    return [Plan(2 * warps), Plan(warps)]


def launcher(problem: Problem, device: torch.device) -> Launcher:
    """The kernel of a problem under the plan of this device class, or the default."""
    plan = choose_plan(OP, problem, device, candidates)
    constants = {"HEIGHT": problem.height, "WIDTH": problem.width, "P": problem.pixels}
    # Pillow rounds a product before it adds to it.
    options = {"enable_fp_fusion": False}
    return Launcher(triton_kernels.augment_kernel, constants, plan, device, options)


kept_launcher = functools.cache(launcher)
