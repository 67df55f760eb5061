"""Launch plans and the compiled kernel that is kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simpro_kernels import launch
from simpro_kernels.launch import Launcher, Plan, choose_plan
from simpro_kernels.pseudo_label_cross_entropy import plans
from torch._subclasses.fake_tensor import FakeTensorMode


def test_candidates_differ_and_fill_a_multiprocessor() -> None:
    for num_classes in (2, 10, 127, 129, 1000, 2048, 2049, 21841):
        for dtype in (torch.float32, torch.bfloat16):
            for hard in (False, True):
                problem = plans.Problem(num_classes, 2, dtype, 1, hard=hard)
                tried = plans.candidates(problem)
                assert all(plan not in tried[:index] for index, plan in enumerate(tried))
                for plan in tried:
                    threads = 32 * plan.warps * plan.resident
                    assert threads <= 2048
                    assert threads * (plan.registers or 0) <= launch.REGISTERS


def test_a_tuned_plan_takes_the_place_of_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    launch.tuned.cache_clear()
    problem = plans.Problem(1000, 0, torch.bfloat16, 8)
    tuned = {"warps": 2, "registers": 128, "resident": 7, "constants": {"PREFETCH": 0}}
    table = {plans.OP: {problem.key: tuned}}
    (tmp_path / "sm_90.json").write_text(json.dumps(table), encoding="utf-8")
    cuda = torch.device("cuda", 0)
    try:
        assert choose_plan(plans.OP, problem, cuda, plans.candidates) == Plan(**tuned)
        for device, other in (
            (cuda, problem._replace(num_classes=100)),
            (torch.device("cpu"), problem),
        ):
            default = plans.candidates(other)[0]
            assert choose_plan(plans.OP, other, device, plans.candidates) == default
    finally:
        launch.tuned.cache_clear()


def test_the_compiled_kernel_is_kept_and_gets_its_constants_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for Triton's two objects; on a device the other tests launch kept kernels."""
    calls: list[tuple[Any, ...]] = []

    class Kept:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: calls.append(("launched", grid, arguments))

    class Jitted:
        params = tuple(
            SimpleNamespace(name=name, is_constexpr=name.isupper())
            for name in ("x_ptr", "n", "ROWS", "BLOCK")
        )

        def warmup(self, *arguments: Any, grid: Any, **constants: Any) -> Kept:
            calls.append(("compiled", arguments, constants))
            return Kept()

    monkeypatch.setattr(launch, "INTERPRETED", False)
    plan = Plan(warps=2, registers=96, constants={"BLOCK": 8})
    launcher = Launcher(Jitted(), {"ROWS": 4}, plan, torch.device("cpu"))
    launcher(3, "x", 5)
    launcher(7, "y", 6)
    constants = {"ROWS": 4, "BLOCK": 8, "num_warps": 2, "maxnreg": 96}
    assert calls == [
        ("compiled", ("x", 5), constants),
        ("launched", (3, 1, 1), ("x", 5, 4, 8)),
        ("launched", (7, 1, 1), ("y", 6, 4, 8)),
    ]


def test_a_captured_step_zeroes_its_counters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors; each call that makes a tensor would be a node of the graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        assert launch.arrivals(device) is not launch.arrivals(device)
        with launch.shared_arrivals():
            first, large = launch.arrivals(device), launch.arrivals(device, 69)
            assert launch.arrivals(device) is first and launch.arrivals(device, 70) is large
            assert (len(first), len(large)) == (64, 128)
        with launch.shared_arrivals():
            assert launch.arrivals(device) is not first
