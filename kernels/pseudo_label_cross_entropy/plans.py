"""What compiles a kernel of this operation, and the launch plans worth trying for it.

The defaults come from counting: registers and warps that compile without a spill, as many programs
as they let reside on a multiprocessor, enough bytes in flight to hide memory.
"""

import functools
from typing import NamedTuple

import torch
import triton
from simpro_kernels.launch import REGISTERS, Launcher, Plan, choose_plan, resident, round_up
from simpro_kernels.pseudo_label_cross_entropy import triton_rows, triton_tiles, triton_wide

OP = "pseudo_label_cross_entropy"
MAX_TILE = 128
"""Up to this many classes a program takes several rows at a time."""
MAX_ROW = 2048
"""Up to this many classes a row is one block in registers; beyond, blocks of columns."""

REGISTERS_FOR = {4: 80, 8: 128, 16: 168, 32: 255}
"""Registers that so many columns of a row in a lane get along with, in one or two warps."""


class Problem(NamedTuple):
    """All that compiles another kernel."""

    num_classes: int
    num_views: int
    """Constant only beyond ``MAX_ROW`` classes; 0 up to there."""
    dtype: torch.dtype
    align: int
    """Elements that divide the start of rows, and their length with spare ones."""
    prior_weak: bool = True
    prior_strong: bool = True
    hard: bool = False
    with_grad: bool = True
    with_rows: bool = False

    @property
    def width(self) -> int:
        """Elements of a row that the kernels read and write: K and, with spare ones, up to 7."""
        return min(round_up(self.num_classes, self.align), self.block)

    @property
    def block(self) -> int:
        return triton.next_power_of_2(self.num_classes)

    @property
    def key(self) -> str:
        if self.num_classes > MAX_ROW:
            size = f"wide-V{self.num_views}"
        else:
            size = f"{'tile' if self.num_classes <= MAX_TILE else 'row'}-{self.block}"
        target = "hard" if self.hard else "soft"
        bits = 8 * self.dtype.itemsize
        return f"{size}-{bits}bit-align{self.align}-{target}-grad{self.with_grad:d}"


def candidates(problem: Problem) -> list[Plan]:
    """Launch plans worth trying, the default first."""
    if problem.num_classes <= MAX_TILE:
        return _tiles(problem)
    return _rows(problem) if problem.num_classes <= MAX_ROW else _wide(problem)


def launcher(problem: Problem, device: torch.device) -> Launcher:
    """The kernel of a problem under the plan of this device class, or the default."""
    plan = choose_plan(OP, problem, device, candidates)
    constants: dict[str, int] = {
        "K": problem.num_classes,
        "WIDTH": problem.width,
        "HAS_PRIOR_WEAK": problem.prior_weak,
        "HAS_PRIOR_STRONG": problem.prior_strong,
        "HARD": problem.hard,
        "WITH_GRAD": problem.with_grad,
        "WITH_ROWS": problem.with_rows,
        "ALIGN": problem.align,
        "BLOCK": problem.block,
    }
    if problem.num_classes <= MAX_TILE:
        return Launcher(triton_tiles.tile_kernel, constants, plan, device)
    lanes = 32 * plan.warps
    if problem.num_classes <= MAX_ROW:
        vector = min(problem.align, 16 // problem.dtype.itemsize)
        constants |= {"LANES": lanes, "CHUNKS": max(1, problem.block // lanes // vector)}
        return Launcher(triton_rows.row_kernel, constants, plan, device)
    # Four elements a lane at most: with eight, the float32 class sums would need another layout
    # than bfloat16 logits.
    align = min(problem.align, 4)
    block = plan.constants["BLOCK"]
    constants |= {"V": problem.num_views, "ALIGN": align}
    constants |= {"LANES": lanes, "CHUNKS": block // lanes // align}
    return Launcher(triton_wide.wide_kernel, constants, plan, device)


kept_launcher = functools.cache(launcher)


def _tiles(problem: Problem) -> list[Plan]:
    """One warp; 256 elements of a tile are 8 in a lane."""
    sizes = [max(1, min(32, elements // problem.block)) for elements in (256, 128, 512)]
    choices = [(rows, 8) for rows in dict.fromkeys(sizes)] + [(sizes[0], 4), (sizes[0], 16)]
    # Left alone, ptxas spills a value or two to reach an occupancy that so few warps do not need.
    return [
        Plan(1, min(255, REGISTERS // (32 * programs)), programs, {"ROWS": rows})
        for rows, programs in choices
    ]


def _rows(problem: Problem) -> list[Plan]:
    """As few warps as registers allow: a warp alone has no barrier.

    More warps where narrow loads keep many addresses, where hard targets keep the row beside its
    labels, and above 1,024 classes. The request of the next weak row costs its registers.
    """
    item, block = problem.dtype.itemsize, problem.block
    warps = max(1, block // 1024)
    if problem.align < 16 // item or block > 1024:
        warps *= 2
    if problem.hard:
        warps *= 2
    warps = min(warps, max(1, block // 128))
    prefetch = not (item == 4 and block > 1024)
    choices = [(warps, prefetch), (warps, not prefetch)]
    choices += [(w, p) for w in (2 * warps, warps // 2) for p in (prefetch, not prefetch)]
    plans = []
    for w, p in choices:
        if 1 <= w <= block // 128:
            limit = 128 if w >= 4 else REGISTERS_FOR[block // (32 * w)]
            plans.append(Plan(w, limit, resident(w, limit), {"PREFETCH": p}))
    return plans


def _wide(problem: Problem) -> list[Plan]:
    """Eight warps, two programs: at 3 rows each they fill 35 MB of L2 at 21,841 classes in bf16."""
    shapes = [(1024, 8, 2), (1024, 4, 4), (2048, 16, 1)]
    return [Plan(warps, 128, programs, {"BLOCK": block}) for block, warps, programs in shapes]
