"""The check of a GPU machine: its commands, its summary, and dry runs on a CPU."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench_kernels import DTYPES, OPERATIONS, shapes_of
from end_to_end import configured
from gpu_summary import PREDICTED, read, summary
from profile_step import KINDS

from simpro_fast.config import load_config
from tests.conftest import ROOT
from tests.processes import PATIENCE, clean_environment

Row = dict[str, str]
PROGRAMS = {
    "step.csv": "bench_step.py",
    "profile_step.csv": "profile_step.py",
    "end_to_end.csv": "end_to_end.py",
}
"""Of a file of results, where it is not `bench_kernels.py`."""


def gpu_check(
    *arguments: str, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bench/gpu_check.sh", *arguments],
        cwd=ROOT,
        env={**clean_environment(), "OMP_NUM_THREADS": "1", "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def rows_of(command: str, folder: Path) -> Iterator[Row]:
    """What tells the rows apart that a command of a bench will write."""
    program, *words = shlex.split(command)
    options = {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}
    overrides = [word for word in words if re.match(r"[a-z_.0-9]+=", word)]
    if program == "bench/bench_kernels.py":
        op = options["--op"]
        for shape, dtype in itertools.product(shapes_of(options["--shape"]), DTYPES):
            assert shape in OPERATIONS[op].device_shapes + OPERATIONS[op].tuned_shapes
            first, *others = shape
            suffix = ", spare" if op == "pseudo_label_cross_entropy" and len(shape) == 3 else ""
            size = {"rows": str(first), "classes": str(others[0] if others else 0)}
            if op == "batch_norm_act":
                size["rows"] = str(first * others[1] ** 2)
            elif op == "augment":
                size = {"rows": "1664", "classes": str(first)}
            for provider, mode in itertools.product(
                ("triton", "compile"), ("forward", "forward+backward")
            ):
                yield {"file": f"kernel_{op}.csv", "dtype": dtype, **size} | {
                    "provider": provider,
                    "mode": mode + suffix,
                }
    elif program == "bench/end_to_end.py":
        recipe = options["--recipe"]
        configured(recipe, options["--device"], folder, overrides)
        for part in options["--part"].split(","):
            yield {"file": "end_to_end.csv", "recipe": recipe, "part": part}
    elif "--config" in options:
        config = load_config(options["--config"], overrides)
        file = "step.csv" if program == "bench/bench_step.py" else "profile_step.csv"
        parts = options.get("--part", ",".join(f"kind: {kind}" for kind in KINDS))
        for part in parts.split(","):
            yield {"file": file, "part": part, "model": config.model.name} | {
                "norm": config.model.norm_impl,
                "precision": config.train.precision,
                "compile": config.train.compile,
                "image_size": str(config.data.image_size or 32),
            }


def test_the_two_calls_answer_every_prediction(tmp_path: Path) -> None:
    """With a stand-in for Python that notes what it was to run: names, options, sizes and keys."""
    noted = tmp_path / "commands.txt"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport shlex, sys\n"
        f"print(shlex.join(sys.argv[1:]), file=open({str(noted)!r}, 'a'))\n"
    )
    python.chmod(0o755)
    for more in ([], ["--part", "resnet,tune,end_to_end,jpeg"]):
        done = gpu_check("--output", str(tmp_path), *more, python=python)
        assert done.returncode == 0, done.stdout + done.stderr
        limits = [int(limit) for limit in re.findall(r"at most (\d+): ", done.stdout)]
        assert 500 < sum(limits) <= 580, limits
    commands = [line for line in noted.read_text().splitlines() if line.startswith("bench/")]
    rows = [row for command in commands for row in rows_of(command, tmp_path)]
    for prediction in read(PREDICTED):
        where = dict(pair.split("=") for pair in prediction["where"].split(";"))
        where["file"] = prediction["file"]
        assert any(where.items() <= row.items() for row in rows), prediction["what"]
        program = PROGRAMS.get(prediction["file"], "bench_kernels.py")
        for column in {*where, prediction["column"]} - {"file"}:
            assert f'"{column}"' in (ROOT / "bench" / program).read_text(encoding="utf-8"), column


def test_it_names_tests_that_exist() -> None:
    text = (ROOT / "bench/gpu_check.sh").read_text(encoding="utf-8")
    named = re.findall(r"(tests/[\w/.]+)(?:::(\w+))?", text)
    assert len(named) > 5
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_the_summary_says_what_was_not_measured_and_what_failed(tmp_path: Path) -> None:
    (tmp_path / "step.csv").write_text(
        "part,norm,model,precision,compile,ms_p50,machine,commit\n"
        "train,auto,wrn_28_2,bf16,none,20,an H100,abc\n"
        "train,auto,wrn_28_2,bf16,none,24,an H100,abc\n"  # measured again
        "train,eager,wrn_28_2,bf16,cuda-graphs,99,an H100,abc\n"  # torch's batch norm
        "full,auto,wrn_28_2,bf16,none"  # torn off
    )
    (tmp_path / "kernel_augment.csv").write_text("")
    text = summary(tmp_path, ["loss of pseudo-labels (stopped)"])
    table = {cells[1].strip(): [c.strip() for c in cells[2:5]] for cells in map(split, lines(text))}
    assert len(table) > len(read(PREDICTED)) - 5  # with the head, and some say `the same`
    assert table["WRN-28-2 bf16 eager"] == ["12 to 16 ms", "24 ms", "1.5 to 2"]
    assert [what for what, row in table.items() if row[1][0].isdigit()] == ["WRN-28-2 bf16 eager"]
    assert table["WRN-28-2 bf16 one graph"] == ["11 to 16 ms", "not measured", "-"]
    assert table["JPEG files to views of 224 px"] == ["-", "not measured", "-"]
    assert "Measured on: an H100, commit abc\n" in text
    assert text.endswith("\nFailed: loss of pseudo-labels (stopped)\n")
    assert len({len(line) for line in lines(text)}) == 1, "columns are aligned"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def split(line: str) -> list[str]:
    return line.split("|")


def test_a_part_that_crashes_leaves_the_others_and_the_summary(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase $* in *norm_act*) kill -SEGV $$;; *summary*) exec {sys.executable} "$@";;'
        " esac\n"
    )
    python.chmod(0o755)
    done = gpu_check("--output", str(tmp_path), "--part", "norm,loss", python=python)
    assert done.returncode == 1
    assert "== loss of pseudo-labels: done" in done.stdout
    assert done.stdout.endswith("== failed: batch norm\n")
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert text in done.stdout and text.endswith("\nFailed: batch norm\n")


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    parts = "buffers,kernels,norm,step,loss,resnet,jpeg"  # the others have tests of their own
    done = gpu_check("--device", "cpu", "--smoke", "--part", parts, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== all parts done" in done.stdout
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").startswith("== machine")
    rows = read(tmp_path / "step.csv")
    assert [row["part"] for row in rows] == ["train", "full", "train"]
    assert all(float(row["views_per_second"]) > 0 and row["torch"] for row in rows)


@pytest.mark.slow
def test_it_runs_one_part_with_packages_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("echo packages are at hand\n", encoding="utf-8")
    smoke = ("--device", "cpu", "--smoke", "--packages", str(tmp_path))
    done = gpu_check(*smoke, "--part", "profile", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages are at hand" in done.stdout and "bench_step.py" not in done.stdout
    shares = {row["part"]: float(row["share"]) for row in read(tmp_path / "profile_step.csv")}
    assert shares["kind: convolution"] > 0 and shares["kind: batch norm"] > 0


def test_it_keeps_to_its_time_and_knows_its_parts(tmp_path: Path) -> None:
    smoke = ("--device", "cpu", "--smoke", "--output", str(tmp_path))
    done = gpu_check(*smoke, "--part", "step", "--seconds", "1")
    assert done.returncode == 1
    assert "== failed: digits (no time)" in done.stdout
    assert "Failed: digits (no time)\n" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    done = gpu_check("--part", "steps")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no part steps" in done.stderr


def test_it_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = gpu_check("--output", str(tmp_path))
    assert done.returncode == 1
    assert "no CUDA device is visible to torch" in done.stdout + done.stderr
