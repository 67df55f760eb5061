"""Every shipped experiment loads, and is the one that its name says."""

from __future__ import annotations

import pytest
import yaml

from simpro_fast.config import flatten, load_config
from simpro_fast.config.find import shipped_configs
from simpro_fast.config.methods import SimProConfig
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.class_counts import long_tailed_counts, unlabeled_counts

CONFIGS = shipped_configs()
NAMES = sorted(
    str(path.relative_to(CONFIGS).with_suffix(""))
    for path in CONFIGS.glob("*/*.yaml")
    if path.parent.name != "_base"
)


def test_all_cells_are_there() -> None:
    published = ["consistent", "head_tail", "middle", "reversed", "uniform"]
    expected = [f"{folder}_lt/{d}" for folder in ("digits", "fashion_mnist") for d in published]
    for d in [*published, "random"]:
        expected += [f"cifar10_lt/{d}", f"cifar10_lt/{d}_100", f"cifar100_lt/{d}"]
    expected += ["stl10_lt/gamma10", "stl10_lt/gamma20"]
    for side in (32, 64):
        expected += [f"small_imagenet_{k}/{side}" for k in ("127", "1k")]
        expected.append(f"small_imagenet_127/{side}_imbalanced_test")
    expected += ["imagenet_1k/224", "imagenet_127/224"]
    assert sorted(expected) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_config_is_what_its_name_says(name: str) -> None:
    config = load_config(name)
    assert config.name == name
    folder, _, stem = name.partition("/")
    assert config.data.name == folder.removesuffix("_lt")
    by_distribution = ("digits_lt", "fashion_mnist_lt", "cifar10_lt", "cifar100_lt")
    expected = stem.removesuffix("_100") if folder in by_distribution else "consistent"
    assert config.data.unlabeled_distribution == expected
    assert config.data.gamma_unlabeled is None
    assert config.train.steps % config.train.period == 0
    assert load_config(CONFIGS / f"{name}.yaml") == config


def test_what_methods_want_stands_in_the_bases() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        keys = yaml.safe_load(path.read_text())
        assert "method" not in keys, path
        assert "methods" not in keys or path.parent.name == "_base", path


@pytest.mark.parametrize("gamma", [10, 20])
def test_stl10_differs_from_cifar10_in_these_keys_only(gamma: int) -> None:
    stl10, cifar10 = (
        flatten(load_config(f"stl10_lt/gamma{gamma}")),
        flatten(load_config("cifar10_lt/consistent")),
    )
    changed = {key: value for key, value in stl10.items() if cifar10[key] != value}
    assert changed == {
        "name": f"stl10_lt/gamma{gamma}",
        "data.name": "stl10",
        "data.image_size": 32,
        "data.labeled_max": 450,
        "data.gamma_labeled": gamma,
        "data.mu": 16,
    }


PUBLISHED = [name for name in NAMES if name.startswith(("small_imagenet", "cifar"))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_all_published_recipes_share(name: str) -> None:
    config = load_config(name)
    method, optim, train = config.method, config.optim, config.train
    assert (method.name, method.variant, method.momentum) == ("simpro", "released", 0.9)
    assert (method.alpha, method.alpha_max) == ("auto", None)
    assert (config.labeled_views, config.strong_views) == (2, 2)
    assert (optim.name, optim.momentum, optim.nesterov) == ("sgd", 0.9, True)
    assert (optim.weight_decay, optim.schedule, optim.warmup_steps) == (5e-4, "cosine_7_16", 0)
    assert (train.period, train.ema_decay, train.ema_warmup) == (500, 0.999, False)
    assert train.precision == "fp32" and config.evaluate.every == 1


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("small_imagenet")])
def test_small_imagenet_recipe(name: str) -> None:
    config = load_config(name)
    data = config.data
    assert (config.method.tau, config.method.threshold) == (1.0, 0.2)  # type: ignore[attr-defined]
    assert (data.batch_size, data.mu, data.cutout) == (32, 2, 16)
    assert (config.model.name, config.model.activation) == ("resnet50_3x3", "relu")
    assert (config.optim.lr, config.train.steps) == (0.01, 250_000)
    assert data.image_size == (32 if "/32" in name else 64)
    split = (0.2, 1280, 256, None)
    if "127" in name:
        split = (0.1, None, 100, None if "imbalanced" in name else 50)
    assert split == (
        *(data.labeled_fraction, data.total_max, data.gamma_labeled, data.test_per_class),
    )


@pytest.mark.parametrize("classes", ["1k", "127"])
def test_full_imagenet_differs_from_the_small_one_in_these_keys_only(classes: str) -> None:
    full = flatten(load_config(f"imagenet_{classes}/224"))
    small = flatten(load_config(f"small_imagenet_{classes}/64"))
    assert {key: value for key, value in full.items() if small[key] != value} == {
        "name": f"imagenet_{classes}/224",
        "data.name": f"imagenet_{classes}",
        "data.image_size": 224,
        "data.cutout": "auto",
        "model.name": "resnet50",
        "evaluate.every": 10,
    }
    assert full["data.weak_scale"] == [0.5, 1.0] and full["data.strong_scale"] == [0.2, 1.0]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("cifar")])
def test_cifar_recipe(name: str) -> None:
    config = load_config(name)
    method, data = config.method, config.data
    assert isinstance(method, SimProConfig)
    assert (data.batch_size, data.mu, data.cutout) == (64, 8, "auto")
    assert (config.model.name, config.model.bn_momentum) == ("wrn_28_2", 0.001)
    assert (config.optim.lr, config.train.steps) == (0.17, 43_000)
    if name.startswith("cifar100"):
        assert (method.tau, method.threshold) == (1.0, 0.2)
        labeled, gamma, total = 50, 20, 1545
    else:
        assert (method.tau, method.threshold) == (2.0, 0.95)
        labeled, gamma, total = (500, 100, 1236) if name.endswith("_100") else (500, 150, 1162)
    assert (data.labeled_max, data.gamma_labeled) == (labeled, gamma)
    assert data.unlabeled_max == 8 * labeled
    classes = 100 if name.startswith("cifar100") else 10
    assert sum(long_tailed_counts(data.labeled_max, data.gamma_labeled, classes)) == total


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("digits")])
def test_digits_splits_can_be_cut(name: str) -> None:
    config = load_config(name)
    split = make_split(config.data, load_dataset(config.data), config.seed)
    data = config.data
    assert split.unlabeled_counts == tuple(
        unlabeled_counts(
            data.unlabeled_distribution, data.unlabeled_max, data.gamma_labeled, 10, config.seed
        )
    )
    assert split.test_counts == (40,) * 10


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("fashion")])
def test_fashion_mnist_splits_fit(name: str) -> None:
    data = load_config(name).data
    assert (data.labeled_max, data.unlabeled_max, data.gamma_labeled) == (500, 4000, 100)
    labeled = long_tailed_counts(500, 100, 10)
    unlabeled = unlabeled_counts(data.unlabeled_distribution, 4000, 100, 10, 1)
    assert max(n + m for n, m in zip(labeled, unlabeled, strict=True)) <= 6000
