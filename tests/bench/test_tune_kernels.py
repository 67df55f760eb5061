"""The tuner of the launch plans: what it accepts, what it refuses, what it writes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tune_kernels
from kernel_report import (
    ADJUSTED,
    AUGMENT,
    BOTH,
    NORM,
    PSEUDO,
    Row,
    Specialisation,
    _launcher,
    element,
)
from simpro_kernels import launch
from triton.runtime.errors import OutOfResources
from tune_cases import Case, all_cases, work_for
from tune_kernels import merged, tried

from tests.conftest import ROOT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = [
    Case(Specialisation(PSEUDO, 10, "fp32", BOTH, 2), 7),
    Case(Specialisation(PSEUDO, 136, "bf16", "PRIORS", 8), 5),
    Case(Specialisation(PSEUDO, 2050, "bf16", BOTH, 2), 3),
    Case(Specialisation(ADJUSTED, 10, "bf16", BOTH, 2), 9),
    Case(Specialisation(ADJUSTED, 2050, "fp32", BOTH, 2), 3),
    *[
        Case(Specialisation(NORM, 16, dtype, kernel, 8), 150)
        for kernel in ("STATISTICS FLAG", "APPLY", "SUMS FLAG", "GRADIENT FLAG")
        for dtype in ("bf16", "fp32")
    ],
    Case(Specialisation(NORM, 16, "bf16", "GRADIENT", 8), 150),
    Case(Specialisation(AUGMENT, 16, "fp32"), 4),
]


def time_of(run: Any) -> float:
    run()
    return 1.0


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.spec.op}-{case.key}")
def test_plans_are_launched_and_give_the_numbers_of_the_twin(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pointers to what is compiled ahead."""
    kernel = _launcher(case.spec).kernel
    names = list(inspect.signature(kernel.fn).parameters)
    types: dict[str, torch.dtype] = {}
    launch_it = launch.Launcher._launch

    def launched(self: launch.Launcher, programs: int, arguments: tuple[Any, ...]) -> None:
        if self.kernel is kernel:
            pairs = zip(names, arguments, strict=False)
            types.update({name: x.dtype for name, x in pairs if isinstance(x, torch.Tensor)})
        launch_it(self, programs, arguments)

    monkeypatch.setattr(launch.Launcher, "_launch", launched)
    work = work_for(case, DEVICE)
    for plan in (case.plans[0], case.plans[-1]):
        assert tried(case, plan, work, time_of) == 1.0
    assert types == {name: element(name, case.spec) for name in types}


@pytest.mark.parametrize("place", range(5))
def test_a_wrong_number_is_found(place: int) -> None:
    case = SMALL[0]
    work = work_for(case, DEVICE)

    def wrong() -> Any:
        outputs = work.run()
        last = outputs[place].reshape(-1)[-1:]
        last.copy_(~last if last.dtype == torch.bool else last * 1.02 + 1e-3)
        return outputs

    with pytest.raises(AssertionError, match="differs"):
        tried(case, case.plans[0], dataclasses.replace(work, run=wrong), time_of)


def test_a_plan_that_no_launch_takes_is_not_timed() -> None:
    case = SMALL[0]
    work = work_for(case, DEVICE)
    other = dataclasses.replace(case, spec=dataclasses.replace(case.spec, align=1))
    with pytest.raises(AssertionError, match="no launch asked"):
        tried(other, case.plans[0], work, time_of)


def test_the_fastest_right_plan_wins_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With times that are given here; on a GPU they come from events."""
    case = SMALL[0]
    fine = Row(
        PSEUDO, "tile_kernel", 10, "fp32", BOTH, "sm_90", 2, 1, 40, 0, 0, 0, 0, 0, "", "", 8, 8
    )
    spilled = dataclasses.replace(fine, stack_bytes=8)
    rows = [fine, fine, spilled, *[fine] * (len(case.plans) - 3)]

    def winner(times: list[float]) -> tuple[Any, int]:
        given = iter(times)
        monkeypatch.setattr(tune_kernels, "device_us", lambda run: next(given))
        return tune_kernels.tune(case, rows, DEVICE)

    rest = [9.0] * (len(rows) - 3)
    assert winner([5.0, 4.0, *rest]) == (case.plans[1], 1)
    assert winner([5.0, 4.95, *rest]) == (None, 1)
    assert "spills   8  not timed" in capsys.readouterr().out
    kernel = tune_kernels.work_for

    def wrong(case: Case, device: torch.device) -> Any:
        work = kernel(case, device)
        return dataclasses.replace(work, run=lambda: [2 * out for out in work.run()])

    monkeypatch.setattr(tune_kernels, "work_for", wrong)
    assert winner([]) == (None, len(rows))
    assert "WRONG: loss differs" in capsys.readouterr().out

    def too_large(case: Case, device: torch.device) -> Any:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(tune_kernels, "work_for", too_large)
    assert winner([]) == (None, len(rows))
    assert "WRONG: OutOfResources: out of resource" in capsys.readouterr().out


def test_a_winner_is_what_a_launch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    monkeypatch.setattr(launch, "_architecture", lambda _: "sm_90")
    launch._tuned.cache_clear()
    case, winner = SMALL[1], SMALL[1].plans[-1]
    table = merged(merged({}, SMALL[0], SMALL[0].plans[1]), case, winner)
    (tmp_path / "sm_90.json").write_text(json.dumps(table), encoding="utf-8")
    from kernel_report import plans_of, problem_of

    try:
        taken = launch.choose_plan(
            case.spec.op,
            problem_of(case.spec),
            torch.device("cuda", 0),
            plans_of(case.spec.op).candidates,
        )
    finally:
        launch._tuned.cache_clear()
    assert taken == winner
    assert list(merged(table, case, None)[PSEUDO]) == [SMALL[0].key]


def test_a_run_writes_each_winner_at_once_and_stops_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the device, whose part is choosing."""
    path = tmp_path / "tuned" / "sm_90.json"
    seen: list[bool] = []

    def tune(case: Case, rows: Any, device: torch.device) -> tuple[Any, int]:
        seen.append(path.exists())
        return case.plans[1], 0

    def compiled(cases: list[Case], arch: int, jobs: int) -> Any:
        assert arch == 90
        return iter([(case, []) for case in cases])

    monkeypatch.setattr(tune_kernels.dispatch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tune_kernels, "tune", tune)
    monkeypatch.setattr(tune_kernels, "compiled", compiled)
    assert tune_kernels.main(["--op", AUGMENT, "--output", str(path.parent)]) == 0
    assert seen == [False, True, True, True]
    plans = json.loads(path.read_text(encoding="utf-8"))[AUGMENT]
    assert len(plans) == 4 and all(launch.Plan(**plan) for plan in plans.values())
    assert f"4 winners in {path}" in capsys.readouterr().out
    assert tune_kernels.main(["--seconds", "-1", "--output", str(tmp_path)]) == 0
    assert "shapes left out" in capsys.readouterr().out and len(seen) == 4


def test_the_shapes_have_entries_of_their_own_and_plans_to_choose_from() -> None:
    cases = list(all_cases())
    keys = [(case.spec.op, case.key) for case in cases]
    assert len(set(keys)) == len(keys)
    assert {case.spec.op for case in cases} == {PSEUDO, ADJUSTED, NORM, AUGMENT}
    assert all(len(case.plans) > 1 for case in cases)


# A launch must find what the tuner compiled ahead, or its two minutes are twenty. The stand-in is
# a driver that names an architecture; `warmup` is Triton's launch without the launch.
AHEAD = """
import os, sys, tempfile
from pathlib import Path
cache = tempfile.TemporaryDirectory()
os.environ["TRITON_CACHE_DIR"] = cache.name
sys.path.insert(0, "bench")
import kernel_report, tune_kernels
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Driver())
# The quickest to compile.
cases = [case for case in tune_kernels.all_cases() if case.spec.num_classes in (10, 16)]
kinds = {(c.spec.op, c.spec.options): c for c in cases if c.spec.options != "PRIORS"}
for case in kinds.values():
    spec = case.candidates()[-1]
    row = kernel_report.compile_and_inspect(spec, 90)
    assert not row.spills, row
    compiled = set(Path(cache.name).glob("*/*.cubin"))
    launcher = kernel_report._launcher(spec)
    values = [
        1 if p.annotation_type else MockTensor(kernel_report.element(p.name, spec))
        for p in launcher.kernel.params if not p.is_constexpr
    ]
    launcher.kernel.warmup(*values, grid=(1, 1, 1), **launcher.constants, **launcher.options)
    assert compiled == set(Path(cache.name).glob("*/*.cubin")), spec
print(len(kinds), "kernels")
"""


def run_compiler(*command: str, timeout: float) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_plans_compile_without_spills_into_the_cache_of_a_launch() -> None:
    assert run_compiler("-c", AHEAD, timeout=300).endswith(" kernels\n")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_all_plans_compile_without_spills(arch: str) -> None:
    command = ("bench/tune_kernels.py", "--compile-only", "--arch", arch)
    assert f"{len(list(all_cases()))} shapes, 0 plans fail" in run_compiler(*command, timeout=3600)
