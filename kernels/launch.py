"""How a kernel is launched: its plan, the compiled kernel that is kept, the counter of arrivals.

Every operation does it alike:

1. Its ``plans.py`` describes a problem (all that compiles another kernel: classes, dtype,
   alignment, flags) by a hashable tuple with a ``key``, and lists ``candidates(problem)``: the
   launch plans worth trying, first the default, which comes from counting.
2. :func:`choose_plan` takes the plan that ``tuned/sm_<arch>.json`` names for the key, else the
   default. There is no such file until somebody runs ``bench/tune_kernels.py`` of the repository.
3. The operation keeps one :class:`Launcher` per problem and device. Its first call compiles.

The data file: ``{"<operation>": {"<key of the problem>": {"warps": 1, "registers": 255, ...}}}``.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from simpro_kernels.dispatch import INTERPRETED
from torch import Tensor

TUNED = Path(__file__).parent / "tuned"
REGISTERS = 65_536  # of a multiprocessor
MAX_WARPS = 64  # of a multiprocessor


@dataclass(frozen=True)
class Plan:
    """Launch constants: what may differ between devices and changes no result but by rounding."""

    warps: int
    """Of a program."""
    registers: int | None = None
    """A thread may have (``maxnreg``); None leaves it to the compiler."""
    resident: int = 1
    """Programs on a multiprocessor: the grid of persistent programs is this times their number."""
    constants: Mapping[str, int] = field(default_factory=dict)
    """constexpr arguments of the kernel (block sizes, rows of a tile, unrolling)."""

    def programs(self, tiles: int, device: torch.device) -> int:
        """Grid of persistent programs for so many tiles of work: one wave, never empty."""
        return max(1, min(tiles, self.resident * multiprocessors(device)))


class Problem(Protocol):
    """What compiles a kernel, hashable."""

    @property
    def key(self) -> str:
        """Name in the data file; problems with one key share a plan."""
        ...


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def resident(warps: int, registers: int) -> int:
    """Programs that fit on a multiprocessor by registers and warps."""
    return max(1, min(REGISTERS // (32 * registers), MAX_WARPS // 2) // warps)


asked: dict[tuple[str, str], Sequence[Plan]] = {}
"""Of every problem that has got a plan, by operation and key: the candidates, for a tuner."""


def choose_plan(
    op: str, problem: Problem, device: torch.device, candidates: Callable[[Any], Sequence[Plan]]
) -> Plan:
    """The tuned plan of this device class for the problem, else the first candidate."""
    plans = asked[op, problem.key] = candidates(problem)
    entry = tuned(device).get(op, {}).get(problem.key)
    return plans[0] if entry is None else Plan(**entry)


@functools.cache
def tuned(device: torch.device) -> dict[str, dict[str, dict[str, Any]]]:
    """What the data file says; a tuner changes it, and launchers made from then on follow."""
    file = data_file(device)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def data_file(device: torch.device) -> Path:
    """Of the device's class; interpreted there is none."""
    if device.type != "cuda":
        return TUNED / "none.json"
    major, minor = torch.cuda.get_device_capability(device)
    return TUNED / f"sm_{major}{minor}.json"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted: enough programs to exercise sums over programs
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Launcher:
    """A jitted kernel with its constants fixed; compiled at the first call and kept.

    Triton's own launch binds and specialises all arguments anew every time: about 50 us of host
    time for 25 arguments, where the kept kernel takes about 4. Keeping it is right because nothing
    of a call specialises it: every run-time argument is in ``do_not_specialize``, integers have
    annotated types, and alignment is a constant. (A test holds the kernels to that.)
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        plan: Plan,
        device: torch.device,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """``options`` are of the compiler, beside those of the plan."""
        self.plan = plan
        self.kernel = kernel
        self.constants = {**constants, **plan.constants}
        self.options: dict[str, Any] = {**(options or {}), "num_warps": plan.warps}
        if plan.registers is not None:
            self.options["maxnreg"] = plan.registers
        self.device = device
        self._compiled: Any = None
        self._values: tuple[Any, ...] = ()

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch so many programs with the run-time arguments, which stand before the constants."""
        device = self.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(programs, arguments)
        else:
            self._launch(programs, arguments)

    def compile(self, *arguments: Any) -> Any:
        """Compile for the run-time arguments of a launch, and launch nothing.

        Returns:
            Triton's kernel, which a launch with arguments of these types runs. Triton keeps it on
            disk for other processes as well.
        """
        return self.kernel.warmup(*arguments, grid=(1,), **self.constants, **self.options)

    def _launch(self, programs: int, arguments: tuple[Any, ...]) -> None:
        if INTERPRETED:
            self.kernel[programs, 1, 1](*arguments, **self.constants, **self.options)
            return
        if self._compiled is None:
            names = [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]
            self._values = tuple(self.constants[name] for name in names)
            self._compiled = self.compile(*arguments)
        self._compiled[programs, 1, 1](*arguments, *self._values)


_COUNTERS = 64
_counters: dict[tuple[torch.device, int, int], Tensor] = {}
_of_capture: dict[tuple[torch.device, int], Tensor] | None = None


def arrivals(device: torch.device, blocks: int = 1) -> Tensor:
    """Counters, 0 between launches: the program that arrives last adds up the partial results.

    Args:
        blocks: of columns, each with a last program of its own and so a counter.

    Returns:
        int32 [n], n at least `blocks` and a multiple of 64.

    Launches of one stream follow one another and share it. A launch that is being captured gets
    its own, zeroed by the graph, as its replays may run beside other work: a node of the graph for
    each launch, or one for all of them with :func:`shared_arrivals`.
    """
    size = round_up(blocks, _COUNTERS)
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        if _of_capture is None:
            return torch.zeros(size, dtype=torch.int32, device=device)
        return _kept(_of_capture, (device, size), size, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return _kept(_counters, (device, stream, size), size, device)


@contextmanager
def shared_arrivals() -> Iterator[None]:
    """Around the capture of a graph whose launches follow one another: they share counters."""
    global _of_capture
    _of_capture = {}
    try:
        yield
    finally:
        _of_capture = None


def _kept(kept: dict[Any, Tensor], key: Any, size: int, device: torch.device) -> Tensor:
    if key not in kept:
        kept[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return kept[key]
