"""Launch plans and the compiled kernel that is kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import Case, make_inputs
from simpro_kernels import launch, pseudo_label_cross_entropy
from simpro_kernels.launch import Launcher, Plan, choose_plan
from simpro_kernels.pseudo_label_cross_entropy import launch as pseudo
from simpro_kernels.pseudo_label_cross_entropy import plans as pseudo_plans


@pytest.mark.parametrize("num_classes", [10, 300, 2100])
def test_every_candidate_plan_gives_the_same_numbers(
    num_classes: int, device: torch.device
) -> None:
    inputs = make_inputs(Case(5, num_classes), device)
    arguments = (inputs.weak, inputs.strong, inputs.prior_weak, inputs.prior_strong)
    want = pseudo_label_cross_entropy(*arguments, inputs.threshold, impl="eager")
    problem = pseudo_plans.Problem(num_classes, 2, torch.float32, 1)
    plans = pseudo_plans.candidates(problem)
    bound = torch.tensor(inputs.threshold, dtype=torch.float32, device=device)
    assert len(plans) > 1
    for plan in plans:
        options = {"hard": False, "mean": True, "with_grad": False, "plan": plan}
        got = pseudo.launch(*arguments, bound, **options)[:4]
        torch.testing.assert_close(got, tuple(want), rtol=1e-5, atol=1e-6)


def test_candidates_differ_and_fill_a_multiprocessor() -> None:
    for num_classes in (2, 10, 127, 129, 1000, 2048, 2049, 21841):
        for dtype in (torch.float32, torch.bfloat16):
            for hard in (False, True):
                problem = pseudo_plans.Problem(num_classes, 2, dtype, 1, hard=hard)
                plans = pseudo_plans.candidates(problem)
                assert all(plan not in plans[:index] for index, plan in enumerate(plans))
                for plan in plans:
                    threads = 32 * plan.warps * plan.resident
                    assert threads <= 2048
                    assert threads * (plan.registers or 0) <= launch.REGISTERS


def test_a_tuned_plan_takes_the_place_of_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    monkeypatch.setattr(launch, "_architecture", lambda _: "sm_90")
    launch._tuned.cache_clear()
    problem = pseudo_plans.Problem(1000, 0, torch.bfloat16, 8)
    tuned = {"warps": 2, "registers": 128, "resident": 7, "constants": {"PREFETCH": 0}}
    table = {pseudo_plans.OP: {problem.key: tuned}}
    (tmp_path / "sm_90.json").write_text(json.dumps(table), encoding="utf-8")
    cuda = torch.device("cuda", 0)
    try:
        assert choose_plan(pseudo_plans.OP, problem, cuda, pseudo_plans.candidates) == Plan(**tuned)
        for device, other in (
            (cuda, problem._replace(num_classes=100)),
            (torch.device("cpu"), problem),
        ):
            default = pseudo_plans.candidates(other)[0]
            assert choose_plan(pseudo_plans.OP, other, device, pseudo_plans.candidates) == default
    finally:
        launch._tuned.cache_clear()


def test_the_compiled_kernel_is_kept_and_gets_its_constants_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for Triton's two objects; on a device the other tests launch kept kernels."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Grid:
        def __init__(self, name: str, result: Any = None) -> None:
            self.name, self.result = name, result
            self.params = [
                SimpleNamespace(name=name, is_constexpr=name.isupper())
                for name in ("x_ptr", "n", "ROWS", "BLOCK")
            ]

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def run(*arguments: Any, **constants: Any) -> Any:
                calls.append((f"{self.name}{grid}", arguments, constants))
                return self.result

            return run

    monkeypatch.setattr(launch, "INTERPRETED", False)
    plan = Plan(warps=2, registers=96, constants={"BLOCK": 8})
    launcher = Launcher(Grid("jit", Grid("kept")), {"ROWS": 4}, plan, torch.device("cpu"))
    launcher(3, "x", 5)
    launcher(7, "y", 6)
    constants = {"ROWS": 4, "BLOCK": 8, "num_warps": 2, "maxnreg": 96}
    assert calls == [
        ("jit(3, 1, 1)", ("x", 5), constants),
        ("kept(7, 1, 1)", ("y", 6, 4, 8), {}),
    ]
