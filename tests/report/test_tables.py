"""Tables over seeds, and the published numbers beside them."""

from __future__ import annotations

import pytest

from simpro_fast.config import load_config
from simpro_fast.report.published import Published, _by_training, published_for, read_published
from simpro_fast.report.runs import METHOD_TITLES
from simpro_fast.report.tables import METRICS, Block, Cell, latex, markdown
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
    if config.method.name == "simpro":
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
    assert len(_by_training()) == len(numbers)
    for first, *others in numbers.values():
        for other in others:
            assert other["method"] == first["method"] == "SimPro"
            assert other["source"] != first["source"] and "-LT" in first["source"]
        found = published_for(load_config(first["config"], first["overrides"].split()))
        assert found is not None and found.mean == float(first["mean"])


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
    found = published_for(load_config(name, overrides.split()))
    assert (found and found.mean) == mean
