"""The trainer: exact resume, bad losses, what may change, what is written."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch
from simpro_fast.data.pipeline.synthetic_loader import SyntheticLoader
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.distributed.signals import Preempted
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.resume import is_finished
from simpro_fast.training.step_guard import NonFiniteLossError
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError
from tests.equality import assert_bit_equal, by_part, without_clock

MakeConfig = Callable[..., Config]
NAME = "step_%09d.pt"


def train(config: Config, **arguments: Any) -> dict[str, Any]:
    trainer = Trainer(config, start_ranks(config), **arguments)
    try:
        return trainer.fit()
    finally:
        trainer.close()


def rows(config: Config) -> list[dict[str, Any]]:
    text = (config.run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def final_state(config: Config) -> dict[str, Any]:
    return read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0])


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_interrupted_run_equals_the_unbroken_one(
    tiny: MakeConfig, tmp_path: Path, engine: str, optimizer: str
) -> None:
    """Stopped after step 8 of periods of 3, so in the middle of one."""
    changes = {
        "distributed.engine": engine,
        "optim.name": optimizer,
        "optim.lr": 0.05 if optimizer == "sgd" else 0.002,
        "train.ema_warmup": True,
        "train.period": 3,
        "evaluate.every": 2,
    }
    unbroken = tiny({**changes, "output_dir": str(tmp_path / "a")})
    train(unbroken)
    broken = tiny({**changes, "output_dir": str(tmp_path / "b")})
    first = Trainer(broken, start_ranks(broken))
    for _ in range(8):
        first.train_step()
        if first.step % 3 == 0:
            first._end_period()
            first._finish_period()
    first.save()
    first.train_step()  # lost work after the checkpoint
    first.close()
    train(broken)
    expected, found = final_state(unbroken), final_state(broken)
    assert expected["step"] == 12
    assert by_part(expected)["optimizer"], "the optimizer's state is in the checkpoint"
    assert_bit_equal(without_clock(expected), without_clock(found))
    untimed = ("images_per_second", "data_wait_fraction", "peak_memory_mib")
    for a, b in zip(rows(unbroken), rows(broken), strict=True):
        for key in untimed:
            a.pop(key), b.pop(key)
        assert a == b


def test_metrics_have_every_documented_field(tiny: MakeConfig) -> None:
    """Speed, waiting, mask rate, the estimate and its distance, once a period."""
    config = tiny()
    summary = train(config)
    found = rows(config)
    assert [row["step"] for row in found] == [5, 10, 12]
    for row in found:
        assert row["images_per_second"] > 0
        assert 0 <= row["data_wait_fraction"] <= 1
        assert 0 <= row["mask_rate"] <= 1
        assert row["peak_memory_mib"] > 0
        assert row["kl_pi_u"] >= 0
        assert 0 <= row["top1"] <= 100
        for prior in (row["pi_u"], row["phi"]):
            assert len(prior) == 10
            assert math.isclose(sum(prior), 1, abs_tol=1e-9)
        assert {"lr", "period", "loss", "loss_labeled", "loss_unlabeled"} <= row.keys()
        assert "pseudo_label_accuracy" in row
        for key in ("mask_rate_per_class", "pseudo_label_accuracy_per_class", "per_class"):
            assert len(row[key]) == 10
    batch = config.data.batch_size
    assert [sum(row["labeled_draws"]) for row in found] == [5 * batch, 5 * batch, 2 * batch]
    per_class = [sum(counts) for counts in zip(*(r["labeled_draws"] for r in found), strict=True)]
    assert per_class == summary["labeled_draws"]
    stored = json.loads((config.run_dir / "summary.json").read_text())
    assert stored == summary
    assert stored["top1_best"] >= stored["top1"]
    assert len(stored["per_class"]) == len(stored["class_names"]) == 10
    assert sum(stored["pi_u_true"]) == pytest.approx(1)
    environment = json.loads((config.run_dir / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["torch_threads"] == 1
    for name in ("config.yaml", "split.json", "split.npz", "model.safetensors", "model.json"):
        assert (config.run_dir / name).is_file()


def test_finished_run_stays_as_it_is(tiny: MakeConfig) -> None:
    config = tiny()
    train(config)
    before = (config.run_dir / "metrics.jsonl").read_text()
    train(config)
    assert (config.run_dir / "metrics.jsonl").read_text() == before


def test_resume_from_an_older_checkpoint_puts_the_later_ones_aside(tiny: MakeConfig) -> None:
    changes = {"checkpoint.every": 2, "checkpoint.keep": 6}
    config = tiny(changes)
    train(config)
    folder = config.run_dir / "checkpoints"
    branch = tiny({**changes, "checkpoint.keep": 2, "checkpoint.resume": str(folder / (NAME % 4))})
    trainer = Trainer(branch, start_ranks(branch))
    assert not (config.run_dir / "summary.json").exists()
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    trainer.close()
    assert [p.name for p in list_checkpoints(folder)] == [NAME % 7, NAME % 4]
    again = Trainer(config, start_ranks(config))
    again.close()
    assert again.step == 7


def test_a_run_from_another_runs_checkpoint_has_checkpoints_of_its_own(tiny: MakeConfig) -> None:
    """Also where it is stopped before its first step, and where nothing is left to train."""
    whole = tiny({"name": "whole"})
    train(whole)
    source = str(list_checkpoints(whole.run_dir / "checkpoints")[0])
    stopped = tiny({"name": "stopped", "checkpoint.resume": source, "train.steps": 20})
    trainer = Trainer(stopped, start_ranks(stopped))
    trainer.guard.asked_to_stop = lambda: True  # type: ignore[method-assign]
    trainer.state.row = {"step": 12}  # its evaluation is the first work
    with pytest.raises(Preempted) as stop:
        trainer._look_for_a_stop()
    trainer.close()
    assert stop.value.saved_step == 12 == final_state(stopped)["step"]
    ended = tiny({"name": "ended", "checkpoint.resume": source})
    assert train(ended)["steps"] == 12
    assert final_state(ended)["step"] == 12 and (ended.run_dir / "summary.json").is_file()


def test_counts_are_stored_once_and_come_back(tiny: MakeConfig) -> None:
    """In the ranks' rows, not a second time beside the priors."""
    config = tiny({"method.threshold": 0.12})
    first, second = (Trainer(config, start_ranks(config), write=False) for _ in range(2))
    for _ in range(3):
        first.train_step()
    state = first.checkpoints.state_dict(first.state)
    assert sorted(by_part(state)["method"]) == ["phi", "pi_u"]
    second.checkpoints.load_state_dict(state, second.state)
    method = first.algorithm.method
    for name, value in method.state_dict().items():
        assert torch.equal(second.algorithm.method.state_dict()[name], value), name
    assert method.unlabeled_mass.sum() > 0 and method.labeled_count.sum() == 24
    first.close()
    second.close()


def test_shorter_run_than_its_checkpoint_is_refused(tiny: MakeConfig) -> None:
    train(tiny())
    with pytest.raises(ConfigError, match=r"step 12, beyond train\.steps=8"):
        train(tiny({"train.steps": 8}))


def test_top1_stands_only_in_evaluated_periods(tiny: MakeConfig) -> None:
    config = tiny({"train.period": 2, "evaluate.every": 3})
    train(config)
    assert [row["step"] for row in rows(config) if row["top1"] is not None] == [6, 12]


def test_spoiled_weights_are_never_saved(tiny: MakeConfig) -> None:
    """A gradient that overflows under a finite loss: the last good checkpoint stays good."""
    config = tiny()
    trainer = Trainer(config, start_ranks(config))
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    with torch.no_grad():
        next(trainer.algorithm.student.parameters()).fill_(torch.inf)
    trainer.state.step += 1
    with pytest.raises(UserError, match=r"not finite; nothing was saved"):
        trainer.save()
    trainer.close()
    assert final_state(config)["step"] == 3


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"steps": "x"}', "\xff"])
def test_damaged_summary_counts_as_unfinished(tiny: MakeConfig, damage: str) -> None:
    config = tiny()
    train(config)
    (config.run_dir / "summary.json").write_bytes(damage.encode("latin1"))
    assert not is_finished(config, start_ranks(config))
    assert train(config)["steps"] == 12


def test_damaged_metrics_line_is_named_and_the_rest_kept(
    tiny: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny({"train.period": 2})
    train(config)
    path = config.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:20]
    path.write_text("\n".join(lines) + "\n")
    train(config)
    assert [row["step"] for row in rows(config)] == [2, 6, 8, 10, 12]
    assert "line 2 is not JSON" in caplog.text
    assert "is missing" not in caplog.text
    path.unlink()
    train(tiny({"train.period": 2, "train.steps": 13}))
    assert f"{path} is missing: its rows up to step 11 are lost" in caplog.text
    # The row of the checkpoint's own step is made again.
    assert [row["step"] for row in rows(config)] == [12, 13]


def test_failed_start_leaves_no_folder(tiny: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"data\.shift=16"):
        train(tiny({"data.shift": 16}))
    assert not tiny().run_dir.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"data.sampling": "effective_number", "data.sampling_beta": 0.99},
        {"data.strong_views": 3, "data.labeled_views": 1, "data.mu": 1},
        {"optim.grad_clip": 0.1, "optim.warmup_steps": 3, "optim.name": "adamw", "optim.lr": 0.001},
        {"method.variant": "paper", "method.hard": True, "data.overlap": True},
    ],
)
def test_options_train_end_to_end(tiny: MakeConfig, changes: dict[str, Any]) -> None:
    config = tiny(changes)
    train(config)
    assert all(math.isfinite(row["loss"]) for row in rows(config))


def test_resume_none_refuses_a_used_directory(tiny: MakeConfig) -> None:
    train(tiny())
    with pytest.raises(ConfigError, match="not empty"):
        train(tiny({"checkpoint.resume": "none"}))


def test_changed_configuration_is_listed(tiny: MakeConfig) -> None:
    train(tiny())
    with pytest.raises(ConfigError, match=r"method\.tau: 1\.0 -> 2\.0.*optim\.lr: 0\.05 -> 0\.1"):
        train(tiny({"method.tau": 2.0, "optim.lr": 0.1, "train.steps": 20}))


def test_changed_length_goes_on_with_a_warning(
    tiny: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny())
    config = tiny({"train.steps": 16, "checkpoint.every": 3})
    train(config)
    changed = next(r for r in caplog.records if "changes from 12 to 16" in r.getMessage())
    assert changed.__dict__["found_by_all"]  # so that one rank says it
    assert rows(config)[-1]["step"] == 16


def test_changed_data_is_refused(tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint notices other images under the same configuration."""
    train(tiny())
    import simpro_fast.training.trainer as module

    original = module.load_dataset

    def other(data: Any) -> Any:
        dataset = original(data)
        images = dataset.images.copy()
        images[0, 0, 0, 0] ^= 1
        return dataclasses.replace(dataset, images=images)

    monkeypatch.setattr(module, "load_dataset", other)
    with pytest.raises(UserError, match="trained on another data"):
        train(tiny({"train.steps": 20}))


def test_another_split_under_the_same_configuration_is_refused(
    tiny: MakeConfig, tmp_path: Path
) -> None:
    first = tiny({"name": "first"})
    train(first)
    split = dict(np.load(first.run_dir / "split.npz"))
    file = tmp_path / "lists.npz"
    config = tiny({"data.split_file": str(file)})
    np.savez(file, **split)
    train(config)
    np.savez(file, **{**split, "unlabeled": split["unlabeled"][1:]})
    with pytest.raises(UserError, match="trained on another split"):
        train(tiny({"data.split_file": str(file), "train.steps": 20}))


def synthetic(poison_step: int | None = None) -> Callable[..., SyntheticLoader]:
    """A `make_loader` whose batch holds a NaN at one step."""

    class Loader(SyntheticLoader):
        def next(self, step: int) -> Batch:
            batch = super().next(step)
            if step != poison_step:
                return batch
            views = batch.views.clone()
            views[0, 0, 0, 0] = torch.nan
            return dataclasses.replace(batch, views=views)

    return Loader


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_bad_loss_stops_before_the_weights(tiny: MakeConfig, engine: str) -> None:
    config = tiny({"distributed.engine": engine, "device": "cpu"})
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(poison_step=6))
    weights: list[dict[str, torch.Tensor]] = []
    original = trainer.guard.watch

    def watch(loss: torch.Tensor, step: int) -> None:
        if step == 6:
            weights.append(
                {k: v.clone() for k, v in trainer.algorithm.student.state_dict().items()}
            )
        original(loss, step)

    trainer.guard.watch = watch  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.fit()
    trainer.close()
    assert "step 6" in str(caught.value) and "optim.lr" in str(caught.value)
    after = trainer.algorithm.student.state_dict()
    for name, _ in trainer.algorithm.student.named_parameters():
        assert torch.equal(after[name], weights[0][name]), name
    for tensor in trainer.algorithm.average.state_dict().values():
        assert torch.isfinite(tensor).all()
    for tensor in by_part(final_state(config))["average"].values():
        assert torch.isfinite(tensor).all()
    # and training can go on from there
    train(config, make_loader=synthetic())


def test_bf16_keeps_state_in_float32(tiny: MakeConfig) -> None:
    """Autocast runs on CPU too; only the arithmetic of the layers is bfloat16."""
    losses = {}
    for precision in ("fp32", "bf16"):
        config = tiny(
            {"train.precision": precision, "name": precision, "train.steps": 20, "optim.lr": 0.01}
        )
        train(config)
        losses[precision] = rows(config)[-1]["loss"]
        state = by_part(final_state(config))
        for part in ("model", "average"):
            for name, tensor in state[part].items():
                assert tensor.dtype in (torch.float32, torch.int64), name
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)


def test_fp64_is_float64_everywhere_but_in_the_export(tiny: MakeConfig) -> None:
    config = tiny({"train.precision": "fp64"})
    train(config)
    state = by_part(final_state(config))
    for name, tensor in {**state["model"], **state["average"], **state["optimizer"]}.items():
        assert tensor.dtype in (torch.float64, torch.int64), name
    exported = load_file(config.run_dir / "model.safetensors")
    for name, tensor in exported.items():
        assert tensor.dtype in (torch.float32, torch.int64), name
        assert torch.equal(tensor, state["average"][name].to(tensor.dtype)), name


def test_profile_writes_a_trace(tiny: MakeConfig) -> None:
    config = tiny({"train.profile": True})
    train(config)
    assert json.loads((config.run_dir / "trace.json").read_text())["traceEvents"]


def test_unwritten_run_leaves_nothing(tiny: MakeConfig) -> None:
    config = tiny()
    trainer = Trainer(config, start_ranks(config), write=False)
    trainer.train_step()
    trainer.close()
    assert not config.run_dir.exists()
