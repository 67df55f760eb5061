"""Tables over seeds, and the published numbers beside them."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from simpro_fast.answers.report.runs import METHOD_TITLES
from simpro_fast.answers.report.tables import (
    Published,
    latex,
    markdown,
    published_for,
    read_published,
)
from simpro_fast.cli.report import main
from simpro_fast.config import Config, dump_config, load_config
from simpro_fast.config.methods import SimProConfig
from tests.answers.report.small_runs import make_summary, write_run
from tests.config.test_shipped_configs import NAMES

PAPERS = ("cifar10_lt/", "cifar100_lt/", "stl10_lt/", "small_imagenet_")
CONFIGURED = [row for row in read_published() if row["config"]]
SETS = {
    "cifar10": "CIFAR10-LT",
    "cifar100": "CIFAR100-LT",
    "stl10": "STL10-LT",
    "small_imagenet_127": "ImageNet-127",
    "small_imagenet_1k": "ImageNet-1k-LT",
}
DASO_CODE = (
    "data.mu=2 model.bn_momentum=0.1 model.skip_quirk=false optim.lr=0.03 optim.schedule=constant "
    "train.steps=250000 train.ema_warmup=true"
)
ONE_VIEW = "data.labeled_views=1 data.strong_views=1"
ACR_CODE = (
    "method.variant=released data.labeled_views=1 data.mu=1 data.overlap=true optim.lr=0.03 "
    "train.steps=250000"
)


def published(config: Config) -> Published | None:
    return published_for(config.model_dump(mode="json"))


def test_markdown_and_latex_escape_what_means_something() -> None:
    header, rows = ["top-1 %", "a_b|c"], [["A & B \N{PLUS-MINUS SIGN} 1", "70.0"]]
    assert markdown(header, rows) == (
        "| top-1 % | a_b\\|c |\n|---|---|\n| A & B \N{PLUS-MINUS SIGN} 1 | 70.0 |\n"
    )
    lines = latex(header, rows).splitlines()
    assert lines[1:4] == [r"\begin{tabular}{lc}", r"\toprule", r"top-1 \% & a\_b|c \\"]
    assert r"A \& B $\pm$ 1 & 70.0 \\" in lines


@pytest.mark.parametrize("table", SETS.values())
def test_commands_of_a_published_table(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trains what its number was published for, in a run of its own."""
    assert main(["--published", table]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {(row["config"], row["overrides"]) for row in CONFIGURED if row["set"] == table}
    commands = [shlex.split(line, comments=True)[2:] for line in lines if not line.startswith("#")]
    configs = [load_config(name, overrides) for name, *overrides in commands]
    assert len({config.run_dir for config in configs}) == len(configs) == len(cells)
    for config, line in zip(configs, (each for each in lines if each[0] != "#"), strict=True):
        number = published(config)
        assert number is not None
        assert re.search(rf"# {number.mean}0? (\(.*\) )?% by {re.escape(number.method)}, ", line)
    without = [row for row in read_published() if row["set"] == table and not row["config"]]
    assert sum("no configuration" in line for line in lines) == len(without)


def test_a_table_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--published", "CIFAR"]) == 2
    assert "there are CIFAR10-LT, CIFAR100-LT" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds of a published experiment, one run of another split, one that is not finished."""
    paper = load_config("cifar10_lt/reversed")
    other = load_config("cifar10_lt/uniform", ["method.name=fixmatch"])
    for config, seed, values in (
        (paper, 1, {"top1": 80.0}),
        (paper, 2, {"top1": 82.0}),
        (other, 1, {"top1": 60.0, "labeled_counts": [7] * 4, "method": "fixmatch"}),
    ):
        folder = tmp_path / config.name / f"seed{seed}"
        write_run(folder, make_summary(name=config.name, seed=seed, **values))
        (folder / "config.yaml").write_text(dump_config(config))
    begun = tmp_path / "begun/seed1"
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text(dump_config(paper))
    split = {"dataset": "x", "class_names": ["a"], "overlap": False, "hash": "0" * 64}
    split |= {f"num_{name}": 1 for name in ("labeled", "unlabeled", "test")}
    split |= {f"{name}_counts": [1] for name in ("labeled", "unlabeled", "test")}
    (begun / "split.json").write_text(json.dumps(split))
    return tmp_path


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("markdown", "| cifar10_lt/reversed | SimPro | 2 seeds | 81.0 \N{PLUS-MINUS SIGN} 1.4 | "),
        ("latex", r"cifar10\_lt/reversed & SimPro & 2 seeds & 81.0 $\pm$ 1.4 & "),
        ("csv", "cifar10_lt/reversed,SimPro,2 seeds,81.0,1.414"),
    ],
)
def test_report_as_a_table(
    runs: Path, capsys: pytest.CaptureFixture[str], form: str, row: str
) -> None:
    before = sorted(runs.rglob("*"))
    assert main([str(runs), "--format", form]) == 0
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if line.startswith(row)]
    assert "83.5" in line and ("SimPro (Du, Han, Huang, ICML 2024)" in said.out)
    assert "60.0" in said.out and "begun" not in said.out
    assert "begun/seed1: " in said.err and "left out" in said.err
    assert sorted(runs.rglob("*")) == before


def test_csv_has_a_column_for_each_number(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs), "--format", "csv"]) == 0
    rows = {row["experiment"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    paper, other = rows["cifar10_lt/reversed"], rows["cifar10_lt/uniform"]
    assert float(paper["top1_std"]) == pytest.approx(2**0.5) and paper["published"] == "83.5"
    assert other["top1_std"] == "" and other["published"] == ""
    assert float(paper["kl_uniform"]) > 0


def test_no_finished_run_is_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "begun"), "--format", "csv"]) == 1
    assert "no run is finished" in capsys.readouterr().err


def test_every_published_row_is_whole() -> None:
    rows = read_published()
    assert rows
    for row in rows:
        assert 10 < float(row["mean"]) < 100 and row["source"] and row["metric"] == "top1"
        assert not row["std"] or 0 < float(row["std"]) < 4
        assert not row["overrides"] or row["config"]


@pytest.mark.parametrize("row", CONFIGURED, ids=lambda row: f"{row['method']}-{row['mean']}")
def test_published_row_has_the_configuration_that_it_names(row: dict[str, str]) -> None:
    config = load_config(row["config"], row["overrides"].split())
    title, _, without = row["method"].partition(" without ")
    if isinstance(config.method, SimProConfig):
        steps = {(True, True): "", (False, True): "E step", (False, False): "E and M step"}
        assert without == steps[config.method.adjust_pseudo_labels, config.method.adjust_loss]
    else:
        title = row["method"]
    assert METHOD_TITLES[config.method.name] == title
    assert row["set"] == SETS[config.data.name]
    if row["set"] == "STL10-LT":  # an unlabeled part of its own
        assert row["distribution"] == "unknown"
    else:
        assert row["distribution"] == config.data.unlabeled_distribution
    imbalanced = config.data.test_per_class is None and config.data.name == "small_imagenet_127"
    facts = {
        "N1": config.data.labeled_max,
        "M1": config.data.unlabeled_max,
        "gamma": config.data.gamma_labeled,
        "mu": config.data.mu,
        "alpha": config.method.alpha,
        "px": config.data.image_size,
        "test gamma": 286 if imbalanced else 1,
    }
    for part in row["setting"].split(", "):
        key, _, value = part.rpartition(" ")
        key, value = (value, key) if value == "px" else (key, value)
        assert facts[key] == float(value), part


def test_rows_of_one_configuration_are_one_experiment_of_several_tables() -> None:
    """The paper prints some runs twice; the table of results, which stands first, counts."""
    numbers: dict[str, list[dict[str, str]]] = {}
    for row in CONFIGURED:
        numbers.setdefault(f"{row['config']} {row['overrides']}", []).append(row)
    for first, *others in numbers.values():
        for other in others:
            assert other["method"] == first["method"] == "SimPro"
            assert other["source"] != first["source"] and "-LT" in first["source"]
        found = published(load_config(first["config"], first["overrides"].split()))
        assert found is not None and found.mean == float(first["mean"])


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(PAPERS) and "random" not in n])
def test_the_papers_configurations_have_its_number(name: str) -> None:
    found = published(load_config(name, ["seed=7", "data.root=/x", "train.threads=3"]))
    assert found is not None and found.method == "SimPro"


@pytest.mark.parametrize(
    ("name", "overrides", "mean"),
    [
        ("cifar10_lt/reversed", "", 83.5),
        ("cifar10_lt/head_tail_100", "", 83.0),
        ("cifar10_lt/middle", "data.mu=2", 58.8),
        ("cifar10_lt/middle", "method.name=fixmatch", 27.1),
        ("stl10_lt/gamma20", "method.alpha=1", 76.4),
        ("cifar10_lt/uniform", "method.name=simpro_star", 94.1),
        ("cifar10_lt/consistent", "", 74.2),
        ("cifar10_lt/uniform_100", f"method.name=daso method.variant=paper {DASO_CODE}", 86.6),
        ("cifar10_lt/middle_100", f"method.name=daso method.variant=paper {DASO_CODE}", None),
        ("cifar100_lt/reversed", f"method.name=crest_plus {ONE_VIEW} {DASO_CODE}", 32.4),
        ("cifar100_lt/uniform", f"method.name=acr_no_anchors {ACR_CODE}", 50.2),
        ("cifar10_lt/uniform", "method.name=acr", None),
        ("cifar10_lt/reversed", "method.tau=1", None),
        ("cifar10_lt/reversed", "train.steps=1000", None),
        ("cifar10_lt/reversed", "model.weights=x.safetensors", None),
        ("stl10_lt/gamma10", "method.name=fixmatch", None),
        ("cifar10_lt/random", "", None),
        ("digits_lt/reversed", "", None),
    ],
)
def test_only_the_papers_own_configuration(name: str, overrides: str, mean: float | None) -> None:
    found = published(load_config(name, overrides.split()))
    assert (found and found.mean) == mean
