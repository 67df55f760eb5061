"""Weights files: what is taken from them, what is refused, and how a run resumes without one."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from simpro_fast.cli.train import main as train_main
from simpro_fast.config import Config, parse_config
from simpro_fast.config.schema import ModelConfig
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.models import build_model, load_pretrained, pretrained
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.image_folders import tidy
from tests.distributed.gloo_ranks import run_ranks
from tests.equality import by_part

MakeConfig = Callable[..., Config]
State = dict[str, Tensor]


def network(num_classes: int = 3, seed: int = 1, name: str = "small_cnn") -> nn.Module:
    return build_model(ModelConfig(name=name), num_classes, 32, seed=seed)


def state(num_classes: int = 5) -> State:
    return network(num_classes, seed=7).state_dict()


def torch_file(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def is_unchanged(model: nn.Module) -> bool:
    fresh = network().state_dict()
    return all(torch.equal(value, fresh[key]) for key, value in model.state_dict().items())


WRAPPED: dict[str, Callable[[State], Any]] = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"epoch": 3, "state_dict": s, "optimizer": {"lr": 0.1}},
    "model": lambda s: {"model": s},
    "both": lambda s: {"model": {"state_dict": s}},
    "module": lambda s: {f"module.{k}": v for k, v in s.items()},
    "all": lambda s: {"state_dict": {f"_orig_mod.module.{k}": v for k, v in s.items()}},
}


PREFIXED: dict[str, tuple[str, Callable[[State], Any]]] = {
    "moco": (
        "module.encoder_q.",
        lambda s: {
            "state_dict": {
                **{f"module.encoder_q.{k}": v for k, v in s.items()},
                **{f"module.encoder_k.{k}": v.clone().zero_() for k, v in s.items()},
                "module.queue": torch.zeros(2, 2),
            }
        },
    ),
    "backbone alone": (
        "model.backbone.",
        lambda s: {
            **{f"model.backbone.{k}": v for k, v in s.items() if not k.startswith("head.")},
            "model.projector.weight": torch.zeros(4, 2),
        },
    ),
    "average alone": ("", lambda s: {"model_ema": s, "step": 7}),
}


@pytest.mark.parametrize("kind", PREFIXED)
def test_the_prefix_that_most_names_share_is_taken_off(tmp_path: Path, kind: str) -> None:
    given, model = state(), network()
    prefix, wrap = PREFIXED[kind]
    report = load_pretrained(model, torch_file(tmp_path / "w.pt", wrap(given)))
    assert report.prefix == prefix and (not prefix or repr(prefix) in str(report))
    fresh = network().state_dict()
    for name, value in model.state_dict().items():
        expected = fresh if name.startswith("head.") else given
        assert torch.equal(value, expected[name]), name
    assert report.matched == len(given) - 2


@pytest.mark.parametrize("wrap", WRAPPED)
def test_backbone_is_taken_and_a_head_of_another_shape_left(tmp_path: Path, wrap: str) -> None:
    given, model = state(), network()
    report = load_pretrained(model, torch_file(tmp_path / "w.pt", WRAPPED[wrap](given)))
    fresh = network().state_dict()
    for name, value in model.state_dict().items():
        expected = fresh if name.startswith("head.") else given
        assert torch.equal(value, expected[name]), name
    assert (report.matched, report.total) == (len(given) - 2, len(given))
    assert report.dropped == ("head.weight", "head.bias")
    assert report.missing == report.unexpected == ()
    assert report.sha256 == hashlib.sha256((tmp_path / "w.pt").read_bytes()).hexdigest()


def test_head_of_the_same_shape_is_taken(tmp_path: Path) -> None:
    given, model = state(num_classes=3), network()
    save_file(given, tmp_path / "w.safetensors")
    report = load_pretrained(model, tmp_path / "w.safetensors")
    assert report.matched == report.total and report.dropped == ()
    assert all(torch.equal(value, given[key]) for key, value in model.state_dict().items())


def test_half_precision_and_incomplete_files_are_taken_and_told(tmp_path: Path) -> None:
    given, model = state(), network()
    del given["features.0.weight"]
    given["rotation.weight"] = torch.ones(4, 2)
    half = {k: v.half() if v.is_floating_point() else v for k, v in given.items()}
    save_file(half, tmp_path / "w.bin")  # the content counts, not the ending
    report = load_pretrained(model, tmp_path / "w.bin")
    assert report.missing == ("features.0.weight",) and report.unexpected == ("rotation.weight",)
    for part in ("matched", "dropped", "missing", "features.0.weight", "unexpected", "rotation"):
        assert part in str(report)
    taken = model.state_dict()["features.3.weight"]
    assert taken.dtype == torch.float32 and torch.equal(taken, half["features.3.weight"].float())


def test_old_torch_format_is_read(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert load_pretrained(network(), tmp_path / "w.pth").dropped


class Evil:
    """Unpickling it creates a file."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("kind", ["zip", "old", "bare pickle", "hidden"])
def test_malicious_pickles_are_refused_and_not_run(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "w.pt", tmp_path / "broken_in"
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps({**state(), "x": Evil(victim)}))
    else:
        content = (
            {"state_dict": state(), "extra": Evil(victim)} if kind == "hidden" else Evil(victim)
        )
        torch.save(content, path, _use_new_zipfile_serialization=kind != "old")
    model = network()
    with pytest.raises(UserError) as caught:
        load_pretrained(model, path)
    assert not victim.exists() and is_unchanged(model)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    if kind == "bare pickle":  # not torch's format at all, so nothing in it is looked at
        assert "not a weights file" in str(caught.value)
    else:
        assert "mkdir" in str(caught.value) and "state_dict()" in str(caught.value)


def test_other_objects_are_refused_by_name(tmp_path: Path) -> None:
    namespace = torch_file(tmp_path / "a.pt", {"state_dict": state(), "args": argparse.Namespace()})
    with pytest.raises(UserError, match=r"argparse\.Namespace"):
        load_pretrained(network(), namespace)
    whole = torch_file(tmp_path / "b.pt", network())
    with pytest.raises(UserError, match="SmallCNN"):
        load_pretrained(network(), whole)


def another(changes: State) -> State:
    return {**state(), **changes}


BAD: dict[str, tuple[Any, str]] = {
    "another network": (network(name="wrn_10_1").state_dict(), r"only 0 of .*38.* stem\.weight"),
    "mostly missing": (dict(list(state().items())[:15]), "only 15 of"),
    "another stem": (
        another({"features.0.weight": torch.ones(32, 3, 7, 7)}),
        r"features\.0\.weight is \[32, 3, 7, 7\] there and \[32, 3, 3, 3\]",
    ),
    "not finite": (another({"features.1.bias": torch.full((32,), torch.nan)}), "not finite"),
    "infinite when narrowed": (
        another({"features.1.bias": torch.full((32,), 1e300, dtype=torch.float64)}),
        "not finite",
    ),
    "integers": (another({"features.1.bias": torch.ones(32, dtype=torch.int8)}), "torch.int8"),
    "sparse": (another({"features.1.bias": torch.ones(32).to_sparse()}), "torch.sparse"),
    "no names": ([torch.ones(2)], "holds a list"),
    "no tensors": ({"epoch": 3, "lr": 0.1}, "no tensors by name .keys: epoch, lr"),
}


@pytest.mark.parametrize("kind", BAD)
def test_unfit_contents_are_one_line_and_change_nothing(tmp_path: Path, kind: str) -> None:
    content, message = BAD[kind]
    model = network()
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(model, torch_file(tmp_path / "w.pt", content))
    assert is_unchanged(model) and "\n" not in str(caught.value)


def test_a_file_that_contains_itself_ends(tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    with pytest.raises(UserError, match="no tensors"):
        load_pretrained(network(), torch_file(tmp_path / "w.pt", content))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "old", "bit", "text", "empty"])
def test_damaged_files_are_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w"
    torch.save(state(), path, _use_new_zipfile_serialization=kind != "old")
    whole = save(state()) if kind == "safetensors" else path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cut = whole[: len(whole) // 2]
    path.write_bytes(
        {"text": b"<html>not found</html>", "empty": b"", "bit": flipped}.get(kind, cut)
    )
    with pytest.raises(UserError, match=r"damaged|empty") as caught:
        load_pretrained(network(), path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_and_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no.such does not exist"):
        load_pretrained(network(), tmp_path / "no/such")
    with pytest.raises(UserError, match="is a folder"):
        load_pretrained(network(), tmp_path)


def train(config: Config, until: int | None = None) -> Trainer:
    trainer = Trainer(config, start_ranks(config))
    if until is None:
        trainer.fit()
    else:
        while trainer.step < until:
            trainer.train_step()
        trainer.save()
    trainer.close()
    return trainer


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    return torch_file(
        tmp_path / "w.pt", build_model(ModelConfig(name="small_cnn"), 4, 16).state_dict()
    )


def last(config: Config) -> dict[str, Any]:
    return read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0])


def test_resume_needs_no_file_and_notices_another(
    tiny: MakeConfig, weights_file: Path, tmp_path: Path
) -> None:
    """Bit-equal to the unbroken run, whether the file is there, moved or gone."""
    keys = {"model.weights": str(weights_file), "train.steps": 6, "checkpoint.every": 100}
    train(tiny({**keys, "name": "unbroken"}))
    config = tiny(keys)
    train(config, until=3)
    digest = hashlib.sha256(weights_file.read_bytes()).hexdigest()
    assert last(config)["fingerprint"]["weights"] == digest
    environment = json.loads((config.run_dir / "environment.json").read_text())
    report = json.loads((config.run_dir / "weights.json").read_text())
    assert environment["weights"] == report["sha256"] == digest
    assert report["dropped"] == ["head.weight", "head.bias"] and report["missing"] == []

    good = weights_file.read_bytes()
    torch_file(weights_file, build_model(ModelConfig(name="small_cnn"), 4, 16, seed=2).state_dict())
    with pytest.raises(UserError, match="started from other weights"):
        train(config)
    with pytest.raises(ConfigError, match=r"model\.weights"):
        train(tiny({**keys, "model.weights": None}))
    moved = tmp_path / "moved.pt"
    moved.write_bytes(good)
    train(tiny({**keys, "model.weights": str(moved)}), until=4)
    weights_file.unlink()
    train(config)
    expected = last(tiny({**keys, "name": "unbroken"}))
    found = last(config)
    assert found["fingerprint"]["weights"] == digest
    for part in ("model", "average"):
        ours, theirs = by_part(found)[part], by_part(expected)[part]
        assert all(torch.equal(value, ours[key]) for key, value in theirs.items())


def test_fresh_start_without_the_file_is_an_error_and_writes_nothing(tiny: MakeConfig) -> None:
    config = tiny({"model.weights": "/no/such.pt"})
    with pytest.raises(UserError, match=r"/no/such\.pt does not exist"):
        train(config)
    assert not config.run_dir.exists()


def _two_ranks(rank: int, world_size: int, tree: dict[str, Any], other: str) -> Any:
    config = parse_config(tree)
    ranks = Ranks(rank, rank, world_size, world_size, torch.device("cpu"))
    trainer = Trainer(config, ranks, write=False)
    trainer.close()
    read = pretrained._read
    read = pretrained._read
    if rank == 1:  # as on a machine whose disk holds another file at the same path
        pretrained._read = lambda path: read(Path(other))
    try:
        Trainer(config, ranks, write=False)
    except ConfigError as error:
        return trainer.algorithm.student.state_dict(), str(error)
    finally:
        pretrained._read = read
    return trainer.algorithm.student.state_dict(), "no error"


def test_ranks_start_from_the_same_weights(
    tiny: MakeConfig, weights_file: Path, tmp_path: Path
) -> None:
    tree = tiny({"model.weights": str(weights_file)}).model_dump(mode="json")
    given = torch.load(weights_file, weights_only=True)
    other = torch_file(tmp_path / "other.pt", {k: v + 1 for k, v in given.items()})
    (first, said), (second, also_said) = run_ranks(_two_ranks, tree, str(other))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, given[name]) or name.startswith("head.")
    assert "file of model.weights" in said and said == also_said


@pytest.mark.parametrize("scale", [0.1, 0.0])
def test_pretrained_network_on_folders_of_images(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scale: float,
) -> None:
    """By the command: timm's ResNet-18, JPEGs, unlabeled images, 1000 classes before."""
    timm = pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    root = tidy(tmp_path / "data")
    given = timm.create_model("resnet18").state_dict()
    save_file(given, tmp_path / "resnet18.safetensors")
    (tmp_path / "own.yaml").write_text(f"""
name: own
data: {{name: images, labeled: {root}/labeled, unlabeled: {root}/unlabeled, val: {root}/val,
  image_size: 32, batch_size: 3, mu: 2}}
model: {{name: timm/resnet18, weights: resnet18.safetensors}}
optim: {{backbone_lr_scale: {scale}, lr: 0.1, schedule: constant}}
train: {{steps: 3, period: 2, threads: 1, ema_decay: 0.5}}
distributed: {{engine: plain}}
log: {{figures: false, tensorboard: false, progress: "off"}}
""")
    assert train_main(["--config", "own.yaml"]) == 0
    said = capsys.readouterr().out
    assert "120 of 122 tensors matched; dropped" in said and "fc.weight, fc.bias" in said
    run = tmp_path / "runs/own/seed1"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == [0.1, 0.1] and all(row["loss"] > 0 for row in rows)
    found = by_part(read_checkpoint(list_checkpoints(run / "checkpoints")[0]))
    trained = {"fc.weight", "fc.bias"}
    if scale > 0:
        for name in given.keys() - trained:
            if given[name].is_floating_point():
                assert (found["model"][name] != given[name]).any(), name
        trained = {name for name in given if "running" not in name and "tracked" not in name}
    else:  # frozen: left to the file
        assert set(found["model"]) == trained
    slots = {name.removeprefix("momentum_buffer/"): t for name, t in found["optimizer"].items()}
    assert trained <= set(slots)
    assert scale > 0 or set(slots) == trained
    assert slots["fc.weight"].abs().sum() > 0
