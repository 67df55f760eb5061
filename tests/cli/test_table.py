"""`table`: what is trained, what is written, and that it goes on."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from simpro_fast.config import load_config
from tests import processes
from tests.conftest import ROOT, TINY

# Stands for the training command: a run that ends at once, or with the code 3 for seed 9.
STAND_IN = """
import json, pathlib, sys
keys = dict(word.split("=") for word in sys.argv[3:])
if keys["seed"] == "9":
    sys.exit(3)
folder = pathlib.Path("runs", keys["name"], "seed" + keys["seed"])
folder.mkdir(parents=True)
top1 = {"simpro": 80.0, "fixmatch": 60.0}[keys["method.name"]] + int(keys["seed"])
summary = {"steps": 12, "top1": top1, "kl_pi_u": 0.5, "pi_u_true": [0.5, 0.5], "pi_u": None}
summary |= {"name": "", "seed": 1, "method": "", "per_class": None, "class_names": ["a", "b"]}
(folder / "summary.json").write_text(json.dumps(summary))
"""

Table = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Runs `table` on two tiny configurations in `tmp_path`."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**TINY, "name": f"tiny/{name}"}))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    launcher = shlex.join([sys.executable, "-I", "-S", "stand_in.py"])

    def run(*arguments: str) -> CompletedProcess[str]:
        words = ["one.yaml", "two.yaml", "--launcher", launcher, *arguments]
        words += ["--grid", "method.name=simpro,fixmatch", "--output", "out/t"]
        script = str(ROOT / "launch" / "table.py")
        return processes.run(processes.script, script, words, folder=tmp_path)

    return run


def test_a_table_grows(table: Table, tmp_path: Path) -> None:
    first = table("--seeds", "1,2", "--metrics", "top1")
    assert first.returncode == 0, first.stderr
    text = (tmp_path / "out/t.md").read_text()
    assert first.stdout.endswith(text)
    assert "| top-1 % | one | two | mean |" in text
    assert "| SimPro | 81.5 ± 0.7 | 81.5 ± 0.7 | 81.5 |" in text
    assert "| FixMatch | 61.5 ± 0.7 | 61.5 ± 0.7 | 61.5 |" in text
    assert r"SimPro & 81.5 $\pm$ 0.7 & " in (tmp_path / "out/t.tex").read_text()

    more = table("--seeds", "1,2,9")
    assert more.returncode == 1
    assert "sweep of 12 runs, 8 finished before" in more.stdout
    assert more.stderr.count("(exit code 3)\n") == 4
    text = (tmp_path / "out/t.md").read_text()
    assert "| SimPro | 81.5 ± 0.7 (2 of 3 seeds) |" in text
    assert "| uniform guess | 0.000 | 0.000 | 0.000 |" in text


def test_commands_for_a_cluster(table: Table, tmp_path: Path) -> None:
    done = table("--seeds", "1", "--print-commands", "train.steps=9")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists()
    for line in done.stdout.splitlines():
        assert "train.steps=9" in shlex.split(line)


def test_usage(table: Table) -> None:
    for arguments, part in (
        (["--metrics", "topp"], "topp is not one of top1"),
        (["three.yaml"], "three.yaml"),
        (["method.tua=1"], "method.tau"),
    ):
        done = table(*arguments)
        assert done.returncode == 2
        assert part in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("place", ["out", "out/t.md/"])
def test_an_output_that_cannot_be_written_is_told_first(
    table: Table, tmp_path: Path, place: str
) -> None:
    if place.endswith("/"):
        (tmp_path / place).mkdir(parents=True)
    else:
        (tmp_path / place).write_text("where the folder should be")
    done = table("--seeds", "1")
    assert done.returncode == 2 and done.stderr.startswith("error: --output out")
    assert not (tmp_path / "runs").exists()


def test_committed_studies_are_of_rows_that_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import studies

    rows = studies.read_rows("studies")
    assert {row["row"] for row in rows} <= set(studies.ROWS)
    written = (studies.RESULTS / "studies.md").read_text(encoding="utf-8")
    assert rows and studies.table(rows) == written
    for changes in studies.ROWS.values():
        load_config("fashion_mnist_lt/reversed", list(changes))


def test_committed_rows_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows in bench/results are what its tables are made of."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import experiment

    for name in (
        *("digits_lt", "fashion_mnist_lt", "fashion_mnist_lt_14px_800"),
        "fashion_mnist_lt_balanced",
    ):
        rows = experiment.read_rows(name)
        written = (experiment.RESULTS / f"{name}.md").read_text(encoding="utf-8")
        assert rows and experiment.table(rows) == written
    assert {row["method"] for row in experiment.read_rows("fashion_mnist_lt_14px_800")} <= {
        *experiment.METHODS
    }
    cells = [("reversed", "simpro", 1), ("reversed", "fixmatch", 2)]
    found = experiment.members("digits_lt", cells, 1, "_balanced", experiment.BALANCED)
    assert [str(found[cell]) for cell in cells] == [
        f"digits_lt/reversed_balanced/method.name-{method} seed {seed}" for _, method, seed in cells
    ]
    assert json.dumps(found[cells[0]].overrides).count("name=digits") == 1
