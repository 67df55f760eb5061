# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""What the kernels share: tile sizes, alignment, the second reduction, softmax pieces.

Legend: K classes, G programs of a launch. Programs are persistent (each walks over row tiles in a
fixed order), so per-class sums need [G, K] partial sums and one small second reduction instead of
float atomics: two runs are bit-equal.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ONE_BLOCK = 2048
"""Up to this many classes a row is one block in registers; beyond, blocks with online softmax."""

_MAX_ALIGN = 8


@dataclass(frozen=True)
class Tile:
    """Launch constants, a function of K alone."""

    rows: int
    """Rows a program works on at a time."""
    block: int
    """Columns of one block, a power of two."""
    warps: int
    max_registers: int
    """Of a thread. Left alone, ptxas spills a value or two to reach the next occupancy step."""
    programs_per_multiprocessor: int
    """What 65,536 registers allow to be resident, so that all programs run in one wave."""

    @property
    def launch_options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "maxnreg": self.max_registers}

    def programs(self, num_rows: int, device: torch.device) -> int:
        """Grid size: persistent programs, at most one row tile each too many."""
        resident = self.programs_per_multiprocessor * _multiprocessors(device)
        return max(1, min(triton.cdiv(num_rows, self.rows), resident))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted: enough programs to exercise the second reduction
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def tile_for(num_classes: int) -> Tile:
    """The one place where K chooses the code path.

    One block: 8 elements a lane from 256 columns on (one 16-byte load in bfloat16), 4 below, where
    rows rarely allow wide loads and every lane keeps several addresses. Column blocks: two rows at
    a time halve the traffic of the per-class partial sums; one program on each multiprocessor
    keeps the rows in work and the partial sums within the L2 cache, which serves the second reads.
    """
    if num_classes > MAX_ONE_BLOCK:
        return Tile(2, 4096, warps=16, max_registers=128, programs_per_multiprocessor=1)
    block = triton.next_power_of_2(num_classes)
    if block > 1024:
        return Tile(1, block, warps=8, max_registers=128, programs_per_multiprocessor=2)
    # A tile of many rows would leave a small batch to a few multiprocessors.
    rows = min(32, (1024 if block >= 256 else 512) // block)
    return Tile(rows, block, warps=4, max_registers=96, programs_per_multiprocessor=5)


def rows_of(logits: Tensor) -> Tensor:
    """The logits with adjacent columns; any row stride stays (slices, chunks, expanded rows).

    Only strided columns (a transposed matrix, columns expanded from one) are copied.
    """
    if logits.shape[1] == 1 or logits.stride(1) == 1:
        return logits
    return logits.contiguous()


def alignment(*matrices: Tensor) -> int:
    """Elements (8, 4, 2 or 1) that divide every row's start and length in memory.

    Triton learns from an integer argument only whether 16 divides it, and from a pointer whether 16
    bytes do, which K = 1000 or a slice fails. This constant tells it what holds, and because it is
    the only alignment the kernels see, another batch size does not compile another kernel.
    """
    align = _MAX_ALIGN
    for matrix in matrices:
        start = matrix.data_ptr() // matrix.element_size()
        align = gcd(align, matrix.shape[1], matrix.stride(0), start)
    return align


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Launch on the tensor's device, which need not be the current one."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield


@triton.jit
def row_offsets(tile, ROWS: tl.constexpr):
    """Row numbers of a tile as int64: row * stride passes 2**31 for large logits."""
    return tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def aligned_pointers(base, rows, stride, cols, ALIGN: tl.constexpr):
    """Pointers [rows, cols] into a matrix whose rows start at multiples of ALIGN elements."""
    stride = tl.cast(stride, tl.int64) // ALIGN * ALIGN
    pointers = base + rows[:, None] * stride + cols[None, :]
    item_bytes: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    return tl.multiple_of(pointers, [1, ALIGN * item_bytes])


@triton.jit
def finite_or_zero_shift(top):
    """The maximum as a shift: -inf (an empty block or row) would make -inf - -inf = NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def exp_and_sums(values, shift):
    """exp(values - shift) [rows, cols], and its row sums: the ones apart from the rest.

    In a confident row the maximum contributes 1 and the other classes next to nothing. Added up
    one after the other to 1, they lose in float32 what the gradient of such a row consists of.
    """
    exp = tl.exp(values - shift[:, None])
    ones = tl.sum(tl.where(exp == 1.0, 1.0, 0.0), 1)
    rest = tl.sum(tl.where(exp == 1.0, 0.0, exp), 1)
    return exp, ones, rest


@triton.jit
def online_softmax_step(top, ones, rest, values):
    """Merge a block of columns into the running maximum and sums; safe for -inf blocks."""
    new_top = tl.maximum(top, tl.max(values, 1))
    shift = finite_or_zero_shift(new_top)
    _, block_ones, block_rest = exp_and_sums(values, shift)
    scale = tl.exp(top - shift)
    # Under a new maximum the former ones are ordinary terms.
    same = top == new_top
    rest = rest * scale + tl.where(same, 0.0, ones * scale) + block_rest
    ones = tl.where(same, ones, 0.0) + block_ones
    return new_top, ones, rest


@triton.jit
def load_prior(prior_ptr, cols, in_row, HAS_PRIOR: tl.constexpr):
    """log_prior [cols] in float32, zeros without one."""
    if HAS_PRIOR:
        prior = tl.load(prior_ptr + cols, mask=in_row, other=0.0)
    else:
        prior = tl.zeros_like(cols).to(tl.float32)
    return prior


_REDUCE_ROWS = tl.constexpr(256)
_REDUCE_COLS = tl.constexpr(32)


@triton.jit(do_not_specialize=["G", "K"])
def reduce_partials_kernel(
    partial_mass_ptr,  # [G, K]
    partial_loss_ptr,  # [G]
    mass_ptr,  # [K]
    loss_ptr,  # []
    G,
    K,
):
    """Sum the partial results of all programs in a fixed order; K = 0 for the loss alone."""
    cols = tl.program_id(0) * _REDUCE_COLS + tl.arange(0, _REDUCE_COLS)
    mass = tl.zeros([_REDUCE_COLS], dtype=tl.float32)
    loss = 0.0
    for start in range(0, G, _REDUCE_ROWS):
        rows = start + tl.arange(0, _REDUCE_ROWS)
        in_rows = rows < G
        offsets = rows[:, None].to(tl.int64) * K + cols[None, :]
        in_tile = in_rows[:, None] & (cols < K)[None, :]
        mass += tl.sum(tl.load(partial_mass_ptr + offsets, mask=in_tile, other=0.0), 0)
        loss += tl.sum(tl.load(partial_loss_ptr + rows, mask=in_rows, other=0.0), 0)
    tl.store(mass_ptr + cols, mass, mask=cols < K)
    if tl.program_id(0) == 0:
        tl.store(loss_ptr, loss)


def reduce_partials(partial_mass: Tensor, partial_loss: Tensor) -> tuple[Tensor, Tensor]:
    """[G, K] and [G] to [K] and []."""
    num_programs, num_classes = partial_mass.shape
    mass = torch.empty(num_classes, dtype=torch.float32, device=partial_mass.device)
    loss = torch.empty((), dtype=torch.float32, device=partial_mass.device)
    grid = (max(1, triton.cdiv(num_classes, _REDUCE_COLS.value)),)
    reduce_partials_kernel[grid](
        partial_mass, partial_loss, mass, loss, num_programs, num_classes, num_warps=8
    )
    return mass, loss
