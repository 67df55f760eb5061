"""Which launch plan of each kernel is the fastest on this GPU; writes what launches then take.

    python bench/tune_kernels.py                   # all operations, some ten minutes
    python bench/tune_kernels.py --op augment      # one of them

Every launch takes the first plan that its operation lists (`plans.candidates`), unless
kernels/tuned/sm_<arch>.json names another one for its problem. This tries all of them on the shapes
of `OPERATIONS` in bench/bench_kernels.py, each kernel of a call in turn. A plan must give the
numbers of the eager twin, and wins if it makes the call more than 2 % faster than the first plan
(median of triton.testing.do_bench). The file is written after each call, so a run that is stopped
keeps what it has found. Read it, run the kernel tests with it, and commit it. Exits 1 if a plan
fails; once the device itself has failed, all that follow do, so tune what is left with --op.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from bench_kernels import DTYPES, OPERATIONS, Case, check
from common import names_of
from simpro_kernels import dispatch, launch

MARGIN = 0.98


def forget() -> None:
    """The next launch of any operation chooses its plan anew."""
    for op in OPERATIONS:
        importlib.import_module(f"simpro_kernels.{op}.plans").kept_launcher.cache_clear()


def tune(
    case: Case,
    mode: str,
    device: torch.device,
    time_of: Callable[[Callable[[], Any]], float],
    done: set[tuple[str, str]],
) -> int:
    """Set `launch.tuned(device)` to the fastest plan of each kernel that the case launches.

    Those in `done` stay as they are; the others join it. Prints a line for each plan that is tried
    and returns how many failed.
    """
    wanted, failed = case.run("eager", mode), 0
    run = functools.partial(case.run, "triton", mode)
    forget()
    launch.asked.clear()
    run()
    problems = {name: plans for name, plans in launch.asked.items() if name not in done}
    done.update(problems)
    for (op, key), plans in problems.items():
        entries = launch.tuned(device).setdefault(op, {})
        times: dict[int, float] = {}
        for index, plan in enumerate(plans):
            entries[key] = dataclasses.asdict(plan)
            forget()
            try:
                check(run(), wanted)
                times[index] = time_of(run)
                result = f"{1e3 * times[index]:9.1f} us"
            except Exception as error:  # of the compiler, the driver or the comparison
                failed += 1
                result = f"FAILED: {type(error).__name__}: {error}".replace("\n", " ")
            print(f"{op} {key} {mode} #{index}: {result}", flush=True)
        best = min(times, key=times.__getitem__, default=0)
        if best and times[best] < MARGIN * times.get(0, float("inf")):
            entries[key] = dataclasses.asdict(plans[best])
            print(f"{op} {key}: #{best} wins", flush=True)
        else:
            del entries[key]
    forget()
    return failed


def cases(ops: Iterable[str], device: torch.device) -> Iterable[Case]:
    for op in ops:
        known = OPERATIONS[op]
        for shape, dtype in itertools.product(
            known.device_shapes + known.tuned_shapes, DTYPES.values()
        ):
            yield known.make(shape, dtype, device)


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
    from triton.testing import do_bench

    device, failed = torch.device("cuda", torch.cuda.current_device()), 0
    time_of, done = functools.partial(do_bench, return_mode="median"), set[tuple[str, str]]()
    path = launch.data_file(device)
    for case in cases(options.op, device):
        for mode in case.least_bytes:
            failed += tune(case, mode, device, time_of, done)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(launch.tuned(device), indent=1) + "\n", encoding="utf-8")
    print(f"{failed} plans fail; the plans of this device are in {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
