"""Every method in the trainer: resume, micro-batches, ranks, precision, graph, no waiting."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simpro_fast.config import Config, load_config
from simpro_fast.config.methods import METHODS
from simpro_fast.data.loader import build_loader
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.models import head
from simpro_fast.training.step import with_uniforms
from simpro_fast.training.step_graph import StepGraph
from simpro_fast.training.trainer import Trainer
from tests.conftest import ROOT
from tests.distributed.rank_runs import dump, on_ranks
from tests.distributed.rank_runs import train as train_on_ranks
from tests.equality import assert_bit_equal, assert_close, by_part, without_clock
from tests.training.test_method_protocol import interrupted
from tests.training.test_no_sync import READ, CountReads
from tests.training.test_step_graph import RunAgain, weights
from tests.training.test_trainer import final_state, rows, synthetic, train

MakeConfig = Callable[..., Config]
OURS = [name for name in METHODS if "." not in name]

# Keys that bring a method through all of its phases in twelve steps of periods of two.
EARLY: dict[str, dict[str, Any]] = {
    "simpro_star": {"anchor_after": 1},
    "acr": {"estimate_after": 0},
    "acr_no_anchors": {"estimate_after": 0},
    "cdmad": {"correct_after": 0.4},
    "daso": {"warmup": 1, "window": 2},
    "crest_plus": {"generations": 2},
    "darp": {"refine_every": 1},
    "adello": {"distill_after": 0.4},
    "cossl": {"cotrain_after": 0.4},
    "cpg": {"warmup": 1, "window": 1, "vote_share": 0.0},
    "ccl": {"estimate_after": 0, "energy": 3.0},
}

# Keys that leave out terms which compare the rows of a rank with each other, as published.
BY_ROWS: dict[str, dict[str, Any]] = {
    "ccl": {"method.classify_weight": 1.0, "method.smooth_weight": 0.0},
}

BRIEF = {"train.period": 1, "train.steps": 6}
"""As many periods, of one step."""


def changes_of(name: str, **more: Any) -> dict[str, Any]:
    own = {f"method.{key}": value for key, value in EARLY.get(name, {}).items()}
    return {"method.name": name, "optim.lr": 0.02, "train.period": 2, **own, **more}


@pytest.mark.parametrize("name", OURS)
def test_interrupted_run_equals_the_unbroken_one(
    tiny: MakeConfig, tmp_path: Path, name: str
) -> None:
    unbroken = tiny(changes_of(name, output_dir=str(tmp_path / "a")))
    train(unbroken)
    broken = tiny(changes_of(name, output_dir=str(tmp_path / "b")))
    interrupted(broken, 7)
    expected, found = final_state(unbroken), final_state(broken)
    assert_bit_equal(without_clock(expected), without_clock(found))
    for row in rows(unbroken):
        assert math.isfinite(row["loss"])
        assert sum(row["pi_u"]) == pytest.approx(1) and min(row["pi_u"]) >= 0


@pytest.mark.parametrize("name", OURS)
def test_ranks_and_precision(tiny: MakeConfig, name: str) -> None:
    """Two ranks in float64 train what one trains."""
    changes = {"train.precision": "fp64", "model.activation": "silu"}
    config = tiny(changes_of(name, **changes, **BY_ROWS.get(name, {})))
    alone = on_ranks(1, train_on_ranks, dump(config), 8, build_loader)[0]
    first, second = on_ranks(2, train_on_ranks, dump(config), 8, build_loader)
    for key in ("model", "average", "method"):
        assert_close(first[key], alone[key], 1e-7)
        assert_close(first[key], second[key], 0.0)


@pytest.mark.parametrize("name", OURS)
def test_step_reads_one_flag_also_in_micro_batches(tiny: MakeConfig, name: str) -> None:
    config = tiny(changes_of(name, **{"distributed.micro_batch": 4}, **BRIEF))
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
    for step in range(5):
        trainer._begin_phase()
        with CountReads() as counter:
            trainer.train_step()
        assert counter.found == [READ], f"step {step}"
        trainer._end_period()
        trainer._finish_period()
    trainer.close()


@pytest.mark.parametrize("name", OURS)
def test_replayed_steps_train_as_the_usual_ones(
    tiny: MakeConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, but for the rate and the decay, which a graph takes in float32.

    The replayed ones have rows of logits with spare elements, as those of many classes on a GPU.
    """
    changes = {"train.precision": "fp64", "model.activation": "silu"}
    config = tiny(changes_of(name, **changes, **{"train.period": 4, "train.steps": 8}))
    usual, graphed = (
        Trainer(config, start_ranks(config), make_loader=synthetic(), write=False) for _ in range(2)
    )
    recorder = RunAgain()
    graphed.step_graph = StepGraph(graphed.algorithm, recorder)
    for _ in range(8):
        for trainer in (usual, graphed):
            with monkeypatch.context() as patch:
                if trainer is graphed:
                    patch.setattr(head, "linear", head.padded_linear)
                trainer.train_step()
            if trainer.step == 4:
                trainer._end_period()
                trainer._finish_period()
    # Three steps to warm up; a method that changes its mind is recorded anew.
    changed = usual.algorithm.method.phase_at(0) != usual.algorithm.method.phase_at(1)
    assert recorder.calls["replay"] == 8 - 3 * (1 + changed)
    assert recorder.calls["record"] == 1 + changed and recorder.calls["forget"] == changed
    assert_close(weights(graphed.algorithm.student), weights(usual.algorithm.student), 1e-6)
    for key, value in usual.algorithm.method.state_dict().items():
        assert_close(graphed.algorithm.method.state_dict()[key], value, 1e-5)
    for trainer in (usual, graphed):
        trainer.close()


@pytest.mark.parametrize("name", OURS)
def test_every_shipped_experiment_takes_it(name: str) -> None:
    """Without a key of another method left over from the data set's own."""
    folder = ROOT / "configs"
    for path in sorted(folder.glob("*/*.yaml")):
        if not path.parent.name.startswith("_"):
            assert load_config(path, [f"method.name={name}"]).method.name == name


@pytest.mark.parametrize("name", OURS)
def test_nothing_confident_is_harmless(tiny: MakeConfig, name: str) -> None:
    config = tiny(changes_of(name, **{"method.threshold": 1.01}, **BRIEF))
    train(config)
    for row in rows(config):
        assert row["mask_rate"] == 0 and row["pseudo_label_accuracy"] is None
        assert math.isfinite(row["loss"]) and min(row["pi_u"]) >= 0
    assert all(t.isfinite().all() for t in by_part(final_state(config))["average"].values())


@pytest.mark.parametrize("name", OURS)
def test_classes_without_labels_are_harmless(tiny: MakeConfig, name: str) -> None:
    rare = {"data.labeled_max": 12, "data.gamma_labeled": 200, "data.allow_empty_classes": True}
    config = tiny(changes_of(name, **rare, **BRIEF))
    train(config)
    assert config.run_dir.joinpath("split.json").read_text().count(" 0,") >= 1
    for row in rows(config):
        assert math.isfinite(row["loss"]) and min(row["pi_u"]) >= 0
    assert all(t.isfinite().all() for t in by_part(final_state(config))["average"].values())


def test_simpro_compiles_for_a_gpu(tiny: MakeConfig) -> None:
    """As one graph, also what only CUDA tensors take: these are fake."""
    config = tiny({"method.impl": "triton"})
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
    method, given = trainer.algorithm.method, dict[str, Any]()
    hook = method.register_forward_pre_hook(
        lambda _, __, kwargs: given.update(kwargs), with_kwargs=True
    )
    trainer.algorithm.step(with_uniforms(trainer.loader.next(0), trainer.setup), 0.0, 0.0)
    hook.remove()
    trainer.close()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = {k: v.detach().to("cuda").requires_grad_(v.requires_grad) for k, v in given.items()}
        method.to("cuda")
        torch._dynamo.reset()
        graph, _ = torch._dynamo.export(lambda: vars(method(**fake)))()
    called = [str(node.target) for node in graph.graph.nodes]
    assert any(target.startswith("simpro_kernels.") for target in called), called
