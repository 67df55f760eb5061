"""Dry runs of the benches, so that they cannot rot; what they measure is not looked at."""

from __future__ import annotations

import csv
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simpro_fast.config.methods import METHODS
from tests import processes
from tests.conftest import ROOT
from tests.processes import clean_environment

DIGITS = ["--smoke", "--recipe", "digits", "data.mu=2", "distributed.engine=plain"]


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python bench/NAME arguments...`"""
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    more = {"folder": ROOT, "environment": environment, "timeout": 300}
    return processes.run(processes.script, f"{ROOT}/bench/{name}", arguments, **more)


def steps_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["views_per_second"]) > 0 and row["torch"] for row in rows)
    return rows


def test_the_step_bench_times_every_part(tmp_path: Path) -> None:
    target = tmp_path / "step.csv"
    size = ["data.batch_size=8", "data.mu=2", "distributed.engine=plain"]
    done = bench("bench_step.py", "--steps=1", f"--output={target}", *size)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["part"] for row in steps_of(target)] == ["data", "train", "full"]


def test_steps_are_timed_without_a_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a device that takes 5 ms a step and lags behind the host."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from bench_step import WARM_UP, timed

    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            self.at = 5.0 * asked.count("step") + asked.count("wait")

        def synchronize(self) -> None:
            asked.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = timed(lambda i: asked.append("step"), 4, torch.device("cuda"))
    assert times == [5.0] * 4
    assert asked == ["step"] * (WARM_UP + 4) + ["wait"]


def test_time_by_kind_counts_every_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in a range that spans it."""
    from profile_step import by_kind

    names = {"scale_rows_kernel": 100.0, "multi_tensor_apply": 200.0, "Optimizer.step": 250.0}
    events = [
        SimpleNamespace(
            key=key,
            device_type=torch.autograd.DeviceType.CUDA,
            self_device_time_total=us,
            count=1,
            is_user_annotation=key == "Optimizer.step",
        )
        for key, us in names.items()
    ]
    profiler = nullcontext(SimpleNamespace(key_averages=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ranks = SimpleNamespace(device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(train_step=int, setup=SimpleNamespace(ranks=ranks))
    found = {row["part"]: row["ms"] for row in by_kind(trainer, 1) if row["ms"]}
    assert found == {"kind: optimizer and average": 0.2, "kind: loss": 0.1}


def test_the_kernel_bench_compares_and_times() -> None:
    done = bench("bench_kernels.py", "--smoke", "--op", "batch_norm_act,augment")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_bench_of_cached_features_runs() -> None:
    done = bench("bench_features.py", "--smoke", "data.classes=5", "data.batch_size=8", "data.mu=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'what': 'embed'" in done.stdout and "'what': 'cached steps'" in done.stdout


@pytest.mark.slow
def test_ours_and_the_baseline_do_the_same_mathematics() -> None:
    """The bench refuses to time two programs whose losses or updates differ."""
    done = bench("end_to_end.py", *DIGITS, "--part", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same losses, weights and priors from the same batches for 3 steps" in done.stdout
    assert "digits        train" in done.stdout


def test_another_method_is_refused_before_anything_is_timed() -> None:
    done = bench("end_to_end.py", *DIGITS, "method.adjust_loss=false")
    assert done.returncode == 1
    assert "of ours and of the baseline differ by" in done.stderr
    assert "nothing is timed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_methods_bench_compares_all_of_them() -> None:
    size = ["data.batch_size=8", "data.mu=1", "train.threads=1"]
    done = bench("bench_methods.py", "--smoke", "--config=digits_lt/reversed", *size)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = [name for name in METHODS if "." not in name]  # not those of other tests
    assert [line.split()[0] for line in done.stdout.splitlines()] == ours
