"""Tables over seeds, and the published numbers beside them."""

from __future__ import annotations

import pytest

from simpro_fast.config import load_config
from simpro_fast.report.published import Published, _by_training, published_for, read_published
from simpro_fast.report.tables import METRICS, Block, Cell, latex, markdown
from tests.config.test_shipped_configs import NAMES

PAPERS = ("cifar10_lt/", "cifar100_lt/", "stl10_lt/", "small_imagenet_")


def blocks() -> list[Block]:
    published = Published("top1", 83.5, 0.95, "SimPro", "a paper")
    cells = [Cell([80.0, 82.0], 2, published), Cell([70.0], 2)]
    return [
        Block(METRICS["top1"], ["reversed", "head_tail"], {"SimPro": cells}),
        Block(METRICS["kl_pi_u"], ["reversed"], {"A & B, tau 1": [Cell([], 2, published)]}),
    ]


def test_markdown() -> None:
    assert markdown(blocks(), ["Note."]) == (
        "| top-1 % | reversed | head_tail | mean |\n"
        "|---|---|---|---|\n"
        "| SimPro | 81.0 ± 1.4 [83.5 ± 0.95] | 70.0 (1 of 2 seeds) | 75.5 |\n"
        "\n"
        "| KL(true, pi_u), nats | reversed |\n"
        "|---|---|\n"
        "| A & B, tau 1 | - |\n"
        "\n"
        "Note.\n"
    )


def test_latex() -> None:
    lines = latex(blocks(), ["Note."]).splitlines()
    assert lines[:5] == [
        "% Note.",
        r"% \usepackage{booktabs}",
        r"\begin{tabular}{lccc}",
        r"\toprule",
        r"top-1 \% & reversed & head\_tail & mean \\",
    ]
    assert r"SimPro & 81.0 $\pm$ 1.4 [83.5 $\pm$ 0.95] & 70.0 (1 of 2 seeds) & 75.5 \\" in lines
    assert r"A \& B, tau 1 & - \\" in lines


def test_every_published_row_is_whole_and_stands_for_one_configuration() -> None:
    rows = read_published()
    assert rows
    for row in rows:
        assert 10 < float(row["mean"]) < 100 and row["source"] and row["metric"] == "top1"
        assert not row["std"] or 0 < float(row["std"]) < 4
        assert not row["overrides"] or row["config"]
    assert len(_by_training()) == sum(bool(row["config"]) for row in rows)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(PAPERS) and "random" not in n])
def test_the_papers_configurations_have_its_number(name: str) -> None:
    found = published_for(load_config(name, ["seed=7", "data.root=/x", "train.threads=3"]))
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
    found = published_for(load_config(name, overrides.split()))
    assert (found and found.mean) == mean
