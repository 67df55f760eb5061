"""Which launch plan of each kernel is the fastest on this GPU; writes what launches then take.

    python bench/tune_kernels.py                   # all operations, some minutes
    python bench/tune_kernels.py --op augment      # one of them

Every launch takes the first plan that its operation lists (`plans.candidates`), unless
kernels/tuned/sm_<arch>.json names another one for its problem. This tries all of them on the shapes
of `OPERATIONS` in bench/bench_kernels.py, each kernel of a call in turn. A plan must give the
numbers of the eager twin, and wins if it makes the call more than 2 % faster than the first plan
(median of triton.testing.do_bench). All are compiled first, on all cores, into Triton's cache on
disk. Each operation has a process of its own: a plan that breaks the device breaks it for what
follows there. The file is written after each call, so a run that is stopped keeps what it has
found. Read it, run the kernel tests with it, and commit it. Exits 1 if a plan fails.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from bench_kernels import DTYPES, OPERATIONS, Case, Outputs, Shape, check
from common import names_of
from simpro_kernels import dispatch, launch
from simpro_kernels.launch import Launcher, Plan

from simpro_fast.utils.atomic_write import write_json

MARGIN = 0.98
Problem = tuple[str, str]
"""Operation and key of a kernel in the data file."""


def jobs(ops: Iterable[str]) -> Iterator[tuple[str, Shape, str]]:
    """Operation, shape and dtype of every case."""
    for op in ops:
        shapes = OPERATIONS[op].device_shapes + OPERATIONS[op].tuned_shapes
        yield from itertools.product([op], shapes, DTYPES)


def forget() -> None:
    """The next launch of any operation chooses its plan anew."""
    for op in OPERATIONS:
        importlib.import_module(f"simpro_kernels.{op}.plans").kept_launcher.cache_clear()


def each_plan(
    run: Callable[[], Outputs], device: torch.device, done: set[Problem]
) -> Iterator[tuple[Problem, int, Plan]]:
    """Every plan of each kernel that `run` launches, while it is the one that launches take.

    Kernels in `done` are passed over; the others join it, and lose what is tuned for them.
    """
    forget()
    launch.asked.clear()
    run()
    problems = {problem: plans for problem, plans in launch.asked.items() if problem not in done}
    done.update(problems)
    for problem, plans in problems.items():
        entries = launch.tuned(device).setdefault(problem[0], {})
        for index, plan in enumerate(plans):
            entries[problem[1]] = dataclasses.asdict(plan)
            forget()
            yield problem, index, plan
        del entries[problem[1]]
    forget()


def compile_ahead(job: tuple[str, Shape, str], device: torch.device) -> None:
    """Compile what a case launches, by its own calls without the launches.

    What fails here fails again when it is timed, and is told there.
    """
    op, (first, *others), dtype = job
    shape = min(64, first), *others  # nothing of the batch compiles another kernel
    compiled = lambda self, programs, *arguments: self.compile(*arguments)  # noqa: E731
    with mock.patch.object(Launcher, "__call__", compiled), suppress(Exception):
        case = OPERATIONS[op].make(shape, DTYPES[dtype], device)
        for mode in case.least_bytes:
            run = functools.partial(case.run, "triton", mode)
            for _ in each_plan(run, device, set()):
                with suppress(Exception):
                    run()


def tune(
    case: Case,
    mode: str,
    device: torch.device,
    time_of: Callable[[Callable[[], Any]], float],
    done: set[Problem],
) -> int:
    """Set `launch.tuned(device)` to the fastest plan of each kernel that the case launches.

    Those in `done` stay as they are; the others join it. Prints a line for each plan that is tried
    and returns how many failed.
    """
    wanted, failed = case.run("eager", mode), 0
    run = functools.partial(case.run, "triton", mode)
    tried: dict[Problem, list[tuple[float, int, Plan]]] = {}
    for problem, index, plan in each_plan(run, device, done):
        try:
            check(run(), wanted)
            time = time_of(run)
            tried.setdefault(problem, []).append((time, index, plan))
            result = f"{1e3 * time:9.1f} us"
        except Exception as error:  # of the compiler, the driver or the comparison
            failed += 1
            result = f"FAILED: {type(error).__name__}: {error}".replace("\n", " ")
        print(*problem, f"{mode} #{index}: {result}", flush=True)
    for (op, key), times in tried.items():
        time, index, plan = min(times, key=lambda timed: timed[0])
        if times[0][1] or time < MARGIN * times[0][0]:  # without the first plan any is faster
            launch.tuned(device)[op][key] = dataclasses.asdict(plan)
            print(f"{op} {key}: #{index} wins", flush=True)
    forget()
    return failed


def time_plans(op: str, device: torch.device) -> None:
    """Tune an operation into the data file; exits with 1 if a plan or a case fails."""
    from triton.testing import do_bench

    time_of, done, failed = functools.partial(do_bench, return_mode="median"), set[Problem](), 0
    path = launch.data_file(device)
    for _, shape, dtype in jobs([op]):
        try:
            case = OPERATIONS[op].make(shape, DTYPES[dtype], device)
            for mode in case.least_bytes:
                failed += tune(case, mode, device, time_of, done)
                write_json(path, launch.tuned(device))
        except Exception as error:
            failed += 1
            print(f"{op} {shape} {dtype} FAILED: {type(error).__name__}: {error}", flush=True)
    print(f"{op}: {failed} failures; the plans of this device are in {path}", flush=True)
    sys.exit(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Choose the launch plans of this GPU.")
    parser.add_argument("--op", type=names_of(OPERATIONS), default=list(OPERATIONS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not dispatch.HAS_TRITON or dispatch.INTERPRETED:
        print(
            "tune_kernels: needs a CUDA device and triton, without TRITON_INTERPRET",
            file=sys.stderr,
        )
        return 2
    device, processes, failed = torch.device("cuda", 0), get_context("spawn"), False
    try:
        with ProcessPoolExecutor(mp_context=processes) as pool:
            list(pool.map(functools.partial(compile_ahead, device=device), jobs(options.op)))
    except BrokenProcessPool as error:  # what it has not compiled is compiled when it is timed
        print(f"compiling ahead stopped: {error}", flush=True)
    for op in options.op:
        process = processes.Process(target=time_plans, args=(op, device))
        process.start()
        process.join()
        if process.exitcode:
            failed = True
            print(f"{op}: exit code {process.exitcode}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
