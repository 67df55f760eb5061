"""Which launch plan of each kernel is the fastest on this GPU, in under two minutes.

    python bench/tune_kernels.py                   # compile, check, time; writes the winners
    python bench/tune_kernels.py --op augment      # one operation
    python bench/tune_kernels.py --compile-only    # without a GPU: registers and spills for sm_90

Every plan that an operation lists (`plans.candidates`) is tried on the shapes that training meets:
10 to 21,841 classes, the batch norms of WRN-28-2 and ResNet-50, pictures of 32 and 64 pixels. All
cores compile ahead, into the cache in which a launch looks. A plan counts if it spills no register
and gives the numbers of the eager twin in float32; then its time on the device is taken: the L2
cache flushed, the host ahead of the device, median of 11. A winner is written to
kernels/tuned/sm_<arch>.json if it beats the default by more than 2 %, else the default stays; the
file is written after each shape, so a run that is stopped keeps what it has found. Read it, run the
kernel tests with it, and commit it. Exits 1 if a plan spills, fails or gives other numbers.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import L2_FLUSH_BYTES, names_of
from kernel_report import Row, Specialisation, compile_and_inspect, plans_of
from simpro_kernels import dispatch, launch
from simpro_kernels.launch import Plan
from tune_cases import OPS, Case, Work, all_cases, work_for

MARGIN = 0.98
SLEEP_CYCLES = 1_000_000  # Half a millisecond, in which the host queues a call.


def tried(
    case: Case, plan: Plan, work: Work, time_of: Callable[[Callable[[], Any]], float]
) -> float:
    """Microseconds of the case's work under a plan, once its numbers have been found right.

    Raises:
        AssertionError: the numbers are not those of the twin, or no launch took the plan.
    """
    kept = plans_of(case.spec.op).kept_launcher
    kept.cache_clear()
    try:
        with launch.trying(case.spec.op, case.key, plan) as trial:
            work.check(work.run())
            if not trial.asked:
                raise AssertionError(f"no launch asked for a plan of {case.key}")
            return time_of(work.run)
    finally:
        kept.cache_clear()


def device_us(run: Callable[[], Any]) -> float:
    """Median time of a call on the device, which starts when the host is done with it."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in times)


def merged(table: dict[str, Any], case: Case, plan: Plan | None) -> dict[str, Any]:
    """The data file with a plan for the case's key, None for the default."""
    entries = {k: v for k, v in table.get(case.spec.op, {}).items() if k != case.key}
    if plan is not None:
        entries[case.key] = {**dataclasses.asdict(plan), "constants": dict(plan.constants)}
    return {**table, case.spec.op: dict(sorted(entries.items()))}


def _line(case: Case, index: int, row: Row | None, rest: str) -> str:
    plan = case.plans[index]
    constants = " ".join(f"{k}={int(v)}" for k, v in plan.constants.items())
    shape = f"{case.spec.num_classes} {case.spec.dtype} {case.spec.options}"
    compiled_to = "does not compile"
    if row is not None:
        spilled = row.stack_bytes + row.local_loads + row.local_stores
        compiled_to = f"registers {row.registers:3} spills {spilled:3}"
    return (
        f"{case.spec.op[:16]:16} {shape:27} #{index} warps {plan.warps:2} resident "
        f"{plan.resident:2} {constants:18} {compiled_to}  {rest}"
    )


def tune(case: Case, rows: Iterable[Row | None], device: torch.device) -> tuple[Plan | None, int]:
    """The plan to write (None: the default) and how many failed; prints a line for each."""
    work: Work | None = None
    times: dict[int, float] = {}
    failed = 0
    for index, (plan, row) in enumerate(zip(case.plans, rows, strict=True)):
        result = "not timed"
        if row is not None and not row.spills:
            try:
                work = work or work_for(case, device)
                times[index] = tried(case, plan, work, device_us)
                rate = work.least_bytes / times[index] / 1e3
                result = f"{times[index]:8.1f} us {rate:6.0f} GB/s"
            except AssertionError as error:
                result = f"WRONG: {error}"
            except Exception as error:  # of torch, CUDA or Triton: the next shape may be fine
                result = f"WRONG: {type(error).__name__}: {error}".splitlines()[0]
        failed += index not in times
        print(_line(case, index, row, result), flush=True)
    if not times:
        return None, failed
    best = min(times, key=times.__getitem__)
    if best == 0 or times[best] > MARGIN * times.get(0, float("inf")):
        return None, failed
    print(f"{'':16} #{best} wins for {case.key}", flush=True)
    return case.plans[best], failed


def compiled(cases: list[Case], arch: int, jobs: int) -> Iterator[tuple[Case, list[Row | None]]]:
    """Each case with the report on its candidates, as the processes get there."""

    def report(spec: Specialisation) -> Row | None:
        try:
            return waiting[spec].result()
        except Exception as error:  # whatever the compiler raises is a plan that fails
            print(f"{spec}: {type(error).__name__}: {error}", file=sys.stderr)
            return None

    # Forked workers would inherit locks of torch's threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Specialisation, Future[Row]] = {}
        # Defaults first: a kernel is launched beside others of its operation.
        for place in (slice(1), slice(1, None)):
            for spec in itertools.chain(*(case.candidates()[place] for case in cases)):
                waiting[spec] = pool.submit(compile_and_inspect, spec, arch)
        try:
            for case in cases:
                yield case, [report(spec) for spec in case.candidates()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", type=names_of(OPS), default=list(OPS), metavar="NAME,...")
    parser.add_argument("--compile-only", action="store_true", help="without a GPU")
    parser.add_argument("--arch", type=int, default=90, help="with --compile-only (default 90)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seconds", type=float, default=110, help="then no other shape is begun")
    parser.add_argument("--output", type=Path, default=launch.TUNED, help="folder of the data file")
    options = parser.parse_args(arguments)
    started, failed = time.monotonic(), 0
    if not dispatch.HAS_TRITON or dispatch.INTERPRETED:
        print("tune_kernels: needs triton, without TRITON_INTERPRET", file=sys.stderr)
        return 2
    if not options.compile_only and not torch.cuda.is_available():
        print("tune_kernels: no CUDA device is visible; --compile-only needs none", file=sys.stderr)
        return 2
    cases = [case for case in all_cases() if case.spec.op in options.op]
    arch = options.arch
    if not options.compile_only:
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    device = torch.device("cuda", 0)
    path = options.output / f"sm_{arch}.json"
    found = 0
    for number, (case, rows) in enumerate(compiled(cases, arch, options.jobs)):
        if options.compile_only:
            failed += sum(row is None or row.spills for row in rows)
            for index, row in enumerate(rows):
                print(_line(case, index, row, ""), flush=True)
            continue
        if time.monotonic() - started > options.seconds:
            print(f"{options.seconds:.0f} s are over: {len(cases) - number} shapes left out")
            break
        plan, wrong = tune(case, rows, device)
        failed, found = failed + wrong, found + (plan is not None)
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(merged(table, case, plan), indent=1) + "\n"
        path.write_text(text, encoding="utf-8")
        torch.cuda.empty_cache()
    seconds = time.monotonic() - started
    where = "" if options.compile_only else f", {found} winners in {path}"
    print(f"{len(cases)} shapes, {failed} plans fail, {seconds:.0f} s{where}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
