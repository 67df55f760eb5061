"""The tuner of the launch plans: what it tries, what it refuses, what it writes."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_kernels
import pytest
import torch
import tune_kernels
from bench_kernels import DTYPES, OPERATIONS, Case, check
from simpro_kernels import launch
from simpro_kernels.launch import Plan
from triton.errors import TritonError
from tune_kernels import forget, tune

from simpro_fast.data.sampling.draws import Stream
from tests import processes
from tests.conftest import ROOT
from tests.processes import clean_environment

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
PSEUDO, NORM, AUGMENT = OPERATIONS
SMALL = [
    *((PSEUDO, (7, 10), "fp32"), (PSEUDO, (5, 136), "bf16"), (PSEUDO, (5, 300), "fp32")),
    *((PSEUDO, (3, 2050), "fp32"), (NORM, (6, 16, 5), "fp32"), (NORM, (6, 16, 5, 1), "bf16")),
    *((AUGMENT, (8,), "bf16"), (AUGMENT, (28,), "fp32"), (AUGMENT, (64,), "fp32")),
]


@pytest.fixture(autouse=True)
def nothing_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    few = {Stream.AUGMENT_LABELED: (1, 2), Stream.AUGMENT_UNLABELED: (1, 3)}
    monkeypatch.setattr(bench_kernels, "IMAGES", few)
    monkeypatch.setattr(launch, "TUNED", tmp_path / "tuned")
    launch.tuned.cache_clear()
    launch.asked.clear()
    forget()
    yield
    launch.tuned.cache_clear()
    forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of all launches."""
    plans: list[Plan] = []
    original = launch.Launcher.__call__

    def spy(self: launch.Launcher, *arguments: Any) -> None:
        plans.append(self.plan)
        original(self, *arguments)

    monkeypatch.setattr(launch.Launcher, "__call__", spy)
    return plans


def small(op: str = PSEUDO, shape: tuple[int, ...] = (7, 10), dtype: str = "fp32") -> Case:
    return OPERATIONS[op].make(shape, DTYPES[dtype], DEVICE)


@pytest.mark.parametrize(("op", "shape", "dtype"), SMALL, ids=str)
def test_every_plan_is_launched_and_gives_the_numbers_of_the_twin(
    op: str, shape: tuple[int, ...], dtype: str, launched: list[Plan]
) -> None:
    case, done = small(op, shape, dtype), set[tuple[str, str]]()
    *_, mode = case.least_bytes
    assert tune(case, mode, DEVICE, lambda run: 1.0, done) == 0
    assert done == launch.asked.keys() and done
    assert all(plan in launched for plans in launch.asked.values() for plan in plans)
    assert not any(launch.tuned(DEVICE).values()), "no plan was faster than the default"


@pytest.mark.parametrize("place", range(5))
def test_a_wrong_number_is_found(place: int) -> None:
    case = small()
    wanted = case.run("eager", "forward+backward")
    outputs = [tensor.clone() for tensor in case.run("triton", "forward+backward")]
    check(tuple(outputs), wanted)
    last = outputs[place].reshape(-1)[-1:]
    last.copy_(~last if last.dtype == torch.bool else last * 1.02 + 1e-3)
    with pytest.raises(AssertionError, match=f"output {place}"):
        check(tuple(outputs), wanted)


def by_plan(launched: list[Plan], fast: Plan, time: float) -> Callable[[Callable[[], Any]], float]:
    """A clock that shows this time where the plan is launched, else 1."""

    def time_of(run: Callable[[], Any]) -> float:
        launched.clear()
        run()
        return time if fast in launched else 1.0

    return time_of


def test_the_fastest_right_plan_wins_where_it_is_clearly_faster(
    launched: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    """With times that are given here; on a GPU they come from events."""
    case = small()
    case.run("triton", "forward")
    ((problem, plans),) = launch.asked.items()
    assert tune(case, "forward", DEVICE, by_plan(launched, plans[2], 0.99), set()) == 0
    assert launch.tuned(DEVICE)[PSEUDO] == {}, "that is within the noise"
    assert tune(case, "forward", DEVICE, by_plan(launched, plans[2], 0.9), set()) == 0
    assert launch.tuned(DEVICE)[PSEUDO] == {problem[1]: dataclasses.asdict(plans[2])}
    launched.clear()
    case.run("triton", "forward")
    assert plans[2] in launched, "a winner is what a launch takes"
    assert tune(case, "forward", DEVICE, by_plan(launched, plans[1], 0.9), {problem}) == 0
    assert launch.tuned(DEVICE)[PSEUDO] == {problem[1]: dataclasses.asdict(plans[2])}

    def twice() -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in case.calls["eager"]())

    wrong = dataclasses.replace(
        case, calls={**case.calls, "triton": lambda: (kernel(), twice())[1]}
    )
    kernel = case.calls["triton"]
    capsys.readouterr()
    failed = tune(wrong, "forward", DEVICE, by_plan(launched, plans[1], 0.9), set())
    assert failed == len(plans) and launch.tuned(DEVICE)[PSEUDO] == {}
    assert capsys.readouterr().out.count("FAILED: AssertionError: output 0") == len(plans)


def test_each_winner_is_written_at_once_and_a_failing_case_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the device, whose part is choosing; a new process finds the file."""
    path = tmp_path / "tuned" / "sm_90.json"
    seen: list[bool] = []
    winner = Plan(warps=2, registers=96, constants={"ROWS": 4})

    def chosen(case: Case, mode: str, device: torch.device, *_: Any) -> int:
        seen.append(path.exists())
        launch.tuned(device).setdefault(PSEUDO, {})[mode] = dataclasses.asdict(winner)
        return 1

    made: list[tuple[int, ...]] = []

    def make(shape: tuple[int, ...], *_: Any) -> Case:
        made.append(shape)
        if len(made) == 1:
            raise TritonError("the reference fails")
        return case

    case, cuda = small(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(tune_kernels, "tune", chosen)
    few = dataclasses.replace(
        OPERATIONS[PSEUDO], make=make, device_shapes=((7, 10),), tuned_shapes=()
    )
    monkeypatch.setitem(OPERATIONS, PSEUDO, few)
    with pytest.raises(SystemExit) as ended:
        tune_kernels.time_plans(PSEUDO, cuda)
    assert ended.value.code == 1
    assert seen == [False, True]
    said = capsys.readouterr().out
    assert "(7, 10) bf16 FAILED: TritonError: the reference fails" in said
    assert f"3 failures; the plans of this device are in {path}" in said
    launch.tuned.cache_clear()
    table = launch.tuned(cuda)
    assert table == json.loads(path.read_text(encoding="utf-8"))
    assert [Plan(**entry) for entry in table[PSEUDO].values()] == [winner] * 2
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_an_operation_that_ends_its_process_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(op: str, device: torch.device) -> None:
        if op == PSEUDO:
            os._exit(7)
        (tmp_path / op).touch()

    monkeypatch.setattr(tune_kernels.dispatch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune_kernels, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr(tune_kernels, "jobs", lambda ops: [])
    monkeypatch.setattr(tune_kernels, "time_plans", timed)
    assert tune_kernels.main([]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {NORM, AUGMENT}
    assert capsys.readouterr().out == f"{PSEUDO}: exit code 7\n"


SHAPES = [(PSEUDO, (64, 10), "bf16"), (AUGMENT, (16,), "fp32")]


def on_no_device() -> torch.device:
    """Triton compiles for an H100, and CPU tensors pass for its own; returns their device."""
    sys.path.insert(0, str(ROOT / "bench"))
    import bench_kernels
    from kernel_report import NoDevice
    from simpro_kernels import dispatch
    from triton.runtime import driver

    driver.set_active(NoDevice(90))
    dispatch._check_triton_can_run = lambda *_: None
    bench_kernels.providers = lambda device: ["eager", "triton"]
    torch.set_num_threads(1)
    return torch.device("cpu")


def compile_the_cases() -> None:
    device = on_no_device()
    from tune_kernels import compile_ahead

    for job in SHAPES:
        compile_ahead(job, device)


def launch_the_cases() -> None:
    """Print what the tuner's launches ask of Triton's compiler, and whether it was there."""
    device = on_no_device()
    import tune_kernels
    from triton import knobs
    from triton.compiler import CompiledKernel

    found: list[tuple[str, bool]] = []
    launched: list[Any] = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
    CompiledKernel.__getitem__ = lambda self, grid: lambda *arguments: launched.append(arguments)
    tune_kernels.check = lambda *_: None  # nothing has run
    for op, shape, dtype in SHAPES:
        case = OPERATIONS[op].make(shape, DTYPES[dtype], device)
        for mode in case.least_bytes:
            tune_kernels.tune(case, mode, device, lambda run: 1.0, set())
    print(json.dumps([found, len(launched)]), file=sys.stderr)


def test_what_launches_ask_for_has_been_compiled_ahead(tmp_path: Path) -> None:
    """In another process, from the same cache on disk."""
    environment = {**clean_environment(), "TRITON_CACHE_DIR": str(tmp_path)}
    done = processes.run(compile_the_cases, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    done = processes.run(launch_the_cases, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    found, launched = json.loads(done.stderr.splitlines()[-1])
    kernels = {"tile_kernel", "scale_rows_kernel", "augment_kernel"}
    assert {name for name, _ in found} == kernels
    assert [name for name, there in found if not there] == []
    assert launched > len(found) > 2 * len(kernels)


def test_without_a_gpu_nothing_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert tune_kernels.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
