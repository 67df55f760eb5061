"""Cached features of a frozen backbone: made once, trained on like images, exported as a whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from simpro_fast import load_model
from simpro_fast.answers.estimation.bayesian import bayesian_shares
from simpro_fast.answers.evaluation import network_input
from simpro_fast.cli.entry import run as run_verb
from simpro_fast.config import Config
from simpro_fast.config.schema import ModelConfig
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.models import build_model, head_of, load_pretrained
from simpro_fast.training import embed as module
from simpro_fast.training.embed import embed
from simpro_fast.training.out_of_fold import fold_of
from simpro_fast.training.setup import build_run_loader
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.image_folders import cut, tidy
from tests.distributed.outcomes import outcome
from tests.distributed.rank_runs import dump, on_ranks
from tests.distributed.rank_runs import train as train_on_ranks
from tests.equality import assert_close
from tests.training.test_every_method import OURS, changes_of
from tests.training.test_method_protocol import interrupted
from tests.training.test_own_images_run import folders
from tests.training.test_trainer import train

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, a small CNN of five classes, and its features of the digits."""
    place = tmp_path_factory.mktemp("features")
    network = build_model(ModelConfig(name="small_cnn"), 5, 8, seed=3)
    network(torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    save_file(network.state_dict(), place / "backbone.safetensors")
    return place


@pytest.fixture
def of_backbone(tiny: MakeConfig, folder: Path) -> MakeConfig:
    """A factory like `tiny` with that backbone, trained on its features."""

    def make(changes: dict[str, Any] | None = None) -> Config:
        weights = {"model.weights": str(folder / "backbone.safetensors")}
        config = tiny({**weights, "name": "embedded"})
        if not (folder / "made").exists():
            run_embed(config, folder / "made")
        return tiny({**weights, "train.features": str(folder / "made"), **(changes or {})})

    return make


def run_embed(config: Config, target: Path, **changes: Any) -> None:
    dataset = load_dataset(config.data)
    embed(
        config,
        dataset,
        start_ranks(config),
        target,
        **{"weak": 2, "strong": 4, "resume": False, **changes},
    )


def test_view_0_is_what_evaluation_sees_and_all_views_are_there(
    of_backbone: MakeConfig, folder: Path
) -> None:
    config = of_backbone()
    found = np.load(folder / "made" / "images.npy")
    dataset = load_dataset(config.data)
    assert found.shape == (1797, 7, 128) and np.isfinite(found).all()
    network = build_model(config.model, 10, dataset.image_size).eval()
    load_pretrained(network, folder / "backbone.safetensors")
    seen: list[Tensor] = []
    head_of(network).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    with torch.no_grad():
        pixels = torch.from_numpy(dataset.images[:9])
        network(network_input(pixels, dataset.mean, dataset.std, torch.float32))
    assert_close(torch.from_numpy(found[:9, 0]).float(), seen[0], 2e-3)
    # Every cached view is of its image: nearer to that than to the others, for most images.
    plain = found[:200, 0].astype(np.float32)
    for view in range(1, 7):
        other = found[:200, view].astype(np.float32)
        assert not np.array_equal(plain, other)
        nearest = ((other[:, None] - plain[None]) ** 2).sum(2).argmin(1)
        assert (nearest == np.arange(200)).mean() > 0.02, "by chance 0.005"


def test_an_interrupted_folder_goes_on_to_the_same_bytes(
    of_backbone: MakeConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_backbone({"train.features": None})
    target = tmp_path / "again"
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    extract, left = module.FeatureExtractor.forward, [0]

    def killed(self: Any, views: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("killed")
        return extract(self, views)

    for left[0] in (3, 20, 40):  # among the plain views, then among the augmented ones
        with monkeypatch.context() as patch:
            patch.setattr(module.FeatureExtractor, "forward", killed)
            with pytest.raises(RuntimeError, match="killed"):
                run_embed(config, target, resume=target.exists())
        assert json.loads((target / "progress.json").read_text())["done"] > 0
        with pytest.raises(UserError, match="no finished features"):
            Trainer(of_backbone({"train.features": str(target)}), start_ranks(config))
        with pytest.raises(UserError, match="--resume"):
            run_embed(config, target)
    with pytest.raises(ConfigError, match="other weights, images or views"):
        run_embed(config, target, resume=True, strong=6)
    run_embed(config, target, resume=True)
    for name in ("images.npy", "features.json"):
        assert (target / name).read_bytes() == (folder / "made" / name).read_bytes()
    assert {p.name for p in target.iterdir()} == {"images.npy", "features.json"}
    with pytest.raises(UserError, match="finished already"):
        run_embed(config, target, resume=True)


def test_features_that_float16_cannot_hold_are_refused(
    tiny: MakeConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = module.FeatureExtractor.forward
    monkeypatch.setattr(
        module.FeatureExtractor, "forward", lambda self, views: 1e6 * extract(self, views)
    )
    config = tiny({"model.weights": str(folder / "backbone.safetensors")})
    with pytest.raises(UserError, match="not finite in float16"):
        run_embed(config, tmp_path / "large")


@pytest.mark.parametrize(
    ("head", "method"),
    [("linear", "simpro"), ("mlp", "simpro"), ("cosine", "simpro"), ("cosine", "abc")],
)
def test_what_is_exported_is_the_whole_network(
    of_backbone: MakeConfig, folder: Path, head: str, method: str
) -> None:
    steps = {"train.steps": 60, "checkpoint.every": 60}
    config = of_backbone({"model.head": head, "method.name": method, **steps})
    trainer = Trainer(config, start_ranks(config))
    assert trainer.fit()["top1"] > 20
    dataset = load_dataset(config.data)
    cached = torch.from_numpy(np.load(folder / "made" / "images.npy")[:200, 0]).float()
    with torch.no_grad():
        trained = trainer.algorithm.network()(cached)
    exported = load_model(config.run_dir, "cpu").logits(dataset.images[:200])
    assert_close(exported, trained, 5e-3)  # float16
    assert trained.abs().max() > 0.5  # so that the tolerance says something


def test_auto_makes_them_once_for_all_runs(
    of_backbone: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train.features": "auto", "data.cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match="only a training makes the features"):
        Trainer(of_backbone(changes), start_ranks(of_backbone()), write=False)
    train(of_backbone(changes))
    (made,) = (tmp_path / "cache").iterdir()
    assert (made / "features.json").is_file()
    monkeypatch.setattr(module, "embed", None)  # it would fail if it were asked again
    train(of_backbone({**changes, "name": "again", "seed": 2}))
    train(of_backbone(changes))  # a finished run


def test_the_labels_alone_are_told_beside_the_run(
    of_backbone: MakeConfig, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = of_backbone()
    summary = train(config)
    split = np.load(config.run_dir / "split.npz")
    features = np.load(folder / "made" / "images.npy")[:, 0].astype(np.float64)
    labels = load_dataset(config.data).labels
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    recalls: list[list[bool]] = [[] for _ in range(10)]
    for row in split["test"]:
        nearest = max(split["labeled"], key=lambda other: unit[row] @ unit[other])
        recalls[labels[row]].append(labels[nearest] == labels[row])
    expected = 100 * np.mean([np.mean(found) for found in recalls])
    assert summary["neighbour_class_mean"] == pytest.approx(expected)
    assert 20 < summary["probe_class_mean"] <= 100
    assert "nearest labeled image" in capsys.readouterr().out


def test_damaged_images_keep_their_rows_and_leave_the_split(
    tiny: MakeConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tidy(tmp_path / "data")
    changes = folders(root, **{"model.weights": str(folder / "backbone.safetensors")})
    files = sorted((root / "unlabeled").rglob("*.*"))
    cut(files[3], files[3])
    with pytest.raises(UserError, match=files[3].name):
        run_embed(tiny(changes), tmp_path / "stopped")
    skipping = tiny({**changes, "data.on_bad_image": "skip"})
    run_embed(skipping, tmp_path / "made")
    images = np.load(tmp_path / "made" / "images.npy")
    (row,) = json.loads((tmp_path / "made" / "damaged.json").read_text())["images"]
    rest = np.delete(images, int(row), 0)
    assert not images[int(row)].any() and rest.any((2,)).all()
    own = {**changes, "data.on_bad_image": "skip", "train.features": str(tmp_path / "made")}
    config = tiny(own)
    trainer = Trainer(config, start_ranks(config))
    trainer.fit()
    assert int(row) not in trainer.state.split.unlabeled
    assert len(trainer.state.split.unlabeled) == len(files) - 1
    with pytest.raises(UserError, match="made with another views"):
        train(tiny({**own, "data.weak_scale": [0.9, 1.0]}))


def test_labeled_images_are_predicted_by_heads_that_have_not_seen_them(
    of_backbone: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = of_backbone({"train.steps": 40, "checkpoint.every": 40, "optim.lr": 0.1})
    train(config)
    table, logits, pictures = (tmp_path / name for name in ("labels.csv", "labels.npy", "seen"))
    pictures.mkdir()
    for row, image in enumerate(load_dataset(config.data).unlabeled_pool[:30]):
        Image.fromarray(np.asarray(image)).save(pictures / f"{row}.png")
    words = [str(config.run_dir), "--out-of-fold", "4", "--output", str(table)]
    assert run_verb("predict", [*words, "--logits", str(logits)]) == 0
    split = np.load(config.run_dir / "split.npz")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == split["labeled"].tolist()
    labels = load_dataset(config.data).labels[split["labeled"]]
    assert [int(row["label"]) for row in rows] == labels.tolist()
    found = np.load(logits)
    assert found.shape == (len(rows), 10) and np.isfinite(found).all()
    assert [int(row["class"]) for row in rows] == found.argmax(1).tolist()
    # Each class has a share of each fold, and heads know something but not the labels by heart.
    fold = fold_of(labels, 4, config.seed)
    for k in range(10):
        counts = np.bincount(fold[labels == k], minlength=4)
        assert counts.max() - counts.min() <= 1
    assert 0.2 < (found.argmax(1) == labels).mean() < 1
    assert run_verb("predict", words) != 0 and "--overwrite" in capsys.readouterr().err
    assert run_verb("predict", [str(config.run_dir), "--output", str(table)]) == 2
    answer = tmp_path / "shares"
    asked = [str(config.run_dir), str(pictures), "--out-of-fold", "4", "--output", str(answer)]
    assert run_verb("shares", [*asked, "--no-figures"]) == 0
    assert "images of the labeled ones, each by a head that has not seen it" in (
        capsys.readouterr().out
    )
    said = json.loads((answer / "shares.json").read_text())
    assert said["calibration"] == {"from": "out of fold", "images": len(labels)}
    confusion = np.zeros((10, 10), np.int64)
    np.add.at(confusion, (labels, found.argmax(1)), 1)
    seen = np.array([row["predicted"] for row in said["rows"]]) * said["images"]
    expected = bayesian_shares(confusion, np.round(seen).astype(int), seed=1)
    np.testing.assert_allclose([row["low"] for row in said["rows"]], expected.low)
    assert all(row["em_calibrated"] is not None for row in said["rows"])
    for folds in (1, len(labels) + 1):
        asked[-3:] = [str(folds), "--output", str(tmp_path / "more")]
        assert run_verb("shares", asked) == 2
        assert f"the run has {len(labels)} labeled images" in capsys.readouterr().err
    environment = config.run_dir / "environment.json"
    said = json.loads(environment.read_text())
    environment.write_text(json.dumps({**said, "data": "0" * 64}))  # labels were added since
    asked[-3] = "4"
    for verb, words_of in (("shares", asked), ("predict", [*words[:-1], str(tmp_path / "n.csv")])):
        assert run_verb(verb, words_of) == 1
        assert "not those it was trained on any more" in capsys.readouterr().err
    whole = of_backbone({"train.features": None, "name": "whole"})
    train(whole)
    words[0], words[-1] = str(whole.run_dir), str(tmp_path / "other.csv")
    assert run_verb("predict", words) == 2
    assert "train.features=auto" in capsys.readouterr().err
    asked[0], asked[-1] = str(whole.run_dir), str(tmp_path / "whole")
    assert run_verb("shares", [*asked, "--no-figures"]) == 2
    assert "train.features=auto" in capsys.readouterr().err


def test_a_new_head_starts_at_zero_and_one_that_fits_as_it_was(
    of_backbone: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    trainer = Trainer(of_backbone(), start_ranks(of_backbone()), write=False)
    trainer.close()
    assert not any(p.any() for p in trainer.algorithm.student.parameters())
    network = build_model(ModelConfig(name="small_cnn"), 10, 16, seed=3)
    save_file(network.state_dict(), tmp_path / "fits.safetensors")
    config = of_backbone({"train.features": None, "model.weights": f"{tmp_path}/fits.safetensors"})
    trainer = Trainer(config, start_ranks(config), write=False)
    trainer.close()
    head = head_of(trainer.algorithm.student)
    assert_close(head.weight, head_of(network).weight, 0.0)


def test_weights_of_a_run_are_normalised_as_it_was(tiny: MakeConfig) -> None:
    first = tiny({"name": "first", "data.mean": [0.1, 0.2, 0.3], "data.std": [0.5] * 3})
    train(first)
    again = tiny({"name": "again", "model.weights": str(first.run_dir / "model.safetensors")})
    trainer = Trainer(again, start_ranks(again), write=False)
    trainer.close()
    assert trainer.setup.dataset.mean == (0.1, 0.2, 0.3)
    assert "of the weights" in trainer.setup.normalised_by


def test_an_interrupted_run_equals_the_unbroken_one(of_backbone: MakeConfig) -> None:
    unbroken, broken = (of_backbone({"name": name}) for name in ("whole", "parts"))
    train(unbroken)
    interrupted(broken, 7)
    outcome(broken).assert_equal(outcome(unbroken))


def test_two_ranks_train_what_one_does(of_backbone: MakeConfig) -> None:
    config = of_backbone({"train.precision": "fp64", "train.period": 2})
    alone = on_ranks(1, train_on_ranks, dump(config), 6)[0]
    first, second = on_ranks(2, train_on_ranks, dump(config), 6)
    for key in ("model", "average", "method"):
        assert_close(first[key], alone[key], 1e-7)
        assert_close(first[key], second[key], 0.0)


@pytest.mark.parametrize("name", OURS)
def test_every_method_trains_on_features(of_backbone: MakeConfig, name: str) -> None:
    config = of_backbone(changes_of(name))
    if name == "cpe":
        with pytest.raises(ConfigError, match="batch norms before the pool"):
            train(config)
        return
    assert np.isfinite(train(config)["pi_u"]).all()


def test_views_of_an_image_differ_and_are_drawn_evenly(of_backbone: MakeConfig) -> None:
    trainer = Trainer(of_backbone(), start_ranks(of_backbone()), write=False)
    seen = np.zeros((3, 7), int)
    for step in range(50):
        views = np.array(trainer.loader.describe(step)["unlabeled_views"])
        assert (views[1] != views[2]).all() and views.shape == (3, 16)
        for kind, row in enumerate(views):
            seen[kind] += np.bincount(row, minlength=7)
    trainer.close()
    assert (seen[0, 1:3] > 320).all() and seen[0].sum() == seen[0, 1:3].sum()
    assert (seen[1:, 3:] > 140).all() and not seen[1:, :3].any()


def test_a_batch_is_sent_without_waiting_for_the_device(
    of_backbone: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(of_backbone(), start_ranks(of_backbone()), write=False)
    setup, device = trainer.setup, torch.device("meta")
    loader = build_run_loader(
        replace(setup, ranks=replace(setup.ranks, device=device)),
        trainer.state.split,
        start_step=0,
        make_loader=build_loader,
    )
    waits, send = [], Tensor.to

    def to(tensor: Tensor, target: Any, **options: Any) -> Tensor:
        if target == device and tensor.device != device:
            waits.append(not options.get("non_blocking"))
        return send(tensor, target, **options)

    monkeypatch.setattr(Tensor, "to", to)
    assert loader.next(0).views.device == device
    trainer.close()
    assert len(waits) > 6 and not any(waits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.weights": None}, "set model.weights"),
        ({"data.cutout": 2}, "made with another views"),
        ({"data.fit": "pad"}, "made with another fit"),
        ({"data.interpolation": "bicubic"}, "made with another interpolation"),
        ({"data.mean": [0.1] * 3, "data.std": [0.3] * 3}, "made with another mean"),
        ({"data.strong_views": 5}, "embed with --strong 5"),
        ({"train.features": "/nowhere"}, "no finished features"),
    ],
)
def test_other_features_are_refused(
    of_backbone: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    of_backbone()
    with pytest.raises(UserError, match=message):
        train(of_backbone(changes))


def test_the_command(
    of_backbone: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    of_backbone()
    words = ["digits_lt/reversed", f"model.weights={folder}/backbone.safetensors"]
    output = ["--output", str(tmp_path / "f"), "--weak", "1", "--strong", "1"]
    assert run_verb("embed", [*words, *output]) == 0
    assert "128 features of 1 + 1 + 1 views" in capsys.readouterr().out
    assert run_verb("embed", [*words, *output]) == 1
    assert run_verb("embed", [*words, *output[:2], "--weak", "2", "--strong", "3"]) == 2
    assert "must be a multiple of --weak 2" in capsys.readouterr().err
    assert run_verb("embed", [words[0], "--output", str(tmp_path / "none")]) == 2
    assert "set model.weights" in capsys.readouterr().err and not (tmp_path / "none").exists()
