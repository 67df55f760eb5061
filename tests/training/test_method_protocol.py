"""What a method may ask of the trainer: it comes, it is right, and runs with it resume exactly."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from simpro_fast.answers.evaluation import network_input
from simpro_fast.answers.model import load_model
from simpro_fast.config import Config
from simpro_fast.config.methods import METHODS
from simpro_fast.data.loader import build_loader
from simpro_fast.data.splits.split import PseudoLabeled
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.methods import Method, register_method
from simpro_fast.training.phases import rate_course
from simpro_fast.training.resume import check_state
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError
from tests.conftest import ROOT
from tests.distributed.rank_runs import dump, on_ranks
from tests.distributed.rank_runs import train as train_on_ranks
from tests.equality import assert_bit_equal, assert_close, by_part, without_clock
from tests.methods.toy_methods import Greedy
from tests.training.test_trainer import final_state, rows, train

MakeConfig = Callable[..., Config]
GREEDY = "tests.methods.toy_methods.Greedy"


def interrupted(config: Config, after: int) -> None:
    first = Trainer(config, start_ranks(config))
    for _ in range(after):
        first.train_step()
        if first.step % config.train.period == 0:
            first._end_period()
            first._finish_period()
    first.save()
    first.train_step()  # lost work after the checkpoint
    first.close()
    train(config)


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({"method.branches": 0, "train.weak_forward": "concat", "distributed.micro_batch": 4}, 7),
        ({"method.phases": True}, 5),  # between two phases
        ({"method.phases": True}, 7),  # in the second one
        ({"method.phases": True, "distributed.engine": "deepspeed", "optim.name": "adamw"}, 10),
    ],
    ids=["micro-batches", "between phases", "within a phase", "adamw"],
)
def test_method_that_asks_for_everything_resumes_exactly(
    tiny: MakeConfig, tmp_path: Path, changes: dict[str, Any], after: int
) -> None:
    changes = {"method.name": GREEDY, "optim.lr": 0.01, **changes}
    unbroken = tiny({**changes, "output_dir": str(tmp_path / "a")})
    train(unbroken)
    broken = tiny({**changes, "output_dir": str(tmp_path / "b")})
    interrupted(broken, after)
    expected, found = final_state(unbroken), final_state(broken)
    assert_bit_equal(without_clock(expected), without_clock(found))
    assert expected["tensors"]["phase"] == (2 if changes.get("method.phases") else 0)
    assert expected["tensors"]["method/table"].count_nonzero() > 10
    tensors, scale = expected["tensors"], "method_parameters.scale"
    own = [name for name in tensors if name.startswith("model/method_parameters.")]
    assert len(own) == 4 and any(name.endswith(scale) for name in tensors if "optimizer/" in name)
    assert tensors[f"model/{scale}"] != 1
    assert tensors[f"model/{scale}"] != tensors[f"average/{scale}"]
    assert_bit_equal(tensors[f"model/{scale}"], tensors["method/scale"])
    exported = [load_file(c.run_dir / "model.safetensors") for c in (unbroken, broken)]
    assert_bit_equal(*exported)
    assert exported[0]["head.weight"].shape == (10, 128)


def test_phases_start_anew_with_more_labeled_images(tiny: MakeConfig) -> None:
    config = tiny({"method.name": GREEDY, "method.phases": True, "train.steps": 17})
    trainer = Trainer(config, start_ranks(config), write=False)
    fresh = {k: v.clone() for k, v in trainer.algorithm.student.state_dict().items()}
    before = trainer.setup.split
    own = len(before.labeled)
    student = trainer.algorithm.student
    for step in range(12):
        if step == 10:
            learned = {
                k: v.clone()
                for k, v in student.state_dict().items()
                if k.startswith("method_parameters.")
            }
            assert len(learned) == 4
            trainer._begin_phase()
            assert_bit_equal(dict(student.state_dict()), {**fresh, **learned})
            assert_bit_equal(dict(trainer.algorithm.average.state_dict()), {**fresh, **learned})
        trainer.train_step()
    split, joined = trainer.state.split, trainer.state.split.pseudo_labeled
    assert len(split.labeled) == own + 4 and len(before.labeled) == own
    assert joined is not None and joined.since == 10
    assert split.labeled[own:].tolist() == before.unlabeled[joined.positions].tolist()
    assert split.targets(trainer.setup.dataset)[own:].tolist() == joined.labels.tolist()
    method = trainer.algorithm.method
    assert [rate_course(config, method, step) for step in (0, 4, 5, 10, 16)] == [
        (0, 5),
        (4, 5),
        (0, 5),
        (0, 7),
        (6, 7),
    ]
    trainer.close()


def test_pseudo_labels_are_what_is_learned_from(tiny: MakeConfig) -> None:
    config = tiny({"data.batch_size": 32})
    trainer = Trainer(config, start_ranks(config), write=False)
    positions, before = np.array([5, 9]), trainer.setup.split
    trainer.loader.close()
    joined = PseudoLabeled(positions, np.array([9, 9]), since=0)
    trainer.state.split = before.with_pseudo_labeled(joined)
    trainer._follow_split()
    loader, own, found = trainer.loader, len(before.labeled), 0
    for step in range(6):
        batch = loader.next(step)
        assert batch.labeled_positions is not None
        for place, position in enumerate(batch.labeled_positions.tolist()):
            if position >= own:
                found += 1
                assert batch.targets[place] == 9
                row = loader.describe(step)["labeled"][place]
                assert row == before.unlabeled[positions[position - own]]
    assert found >= 3
    trainer.close()


def test_two_ranks_give_the_method_what_one_has(tiny: MakeConfig) -> None:
    """Positions, uniforms, tables and sums do not depend on the number of ranks."""
    changes = {"method.name": GREEDY, "train.precision": "fp64", "model.activation": "silu"}
    config = tiny({**changes, "method.phases": True, "optim.lr": 0.01})
    alone = on_ranks(1, train_on_ranks, dump(config), 12, build_loader)[0]
    first, second = on_ranks(2, train_on_ranks, dump(config), 12, build_loader)
    for key in ("model", "average", "method"):
        assert_close(first[key], alone[key], 1e-9)
        assert_close(first[key], second[key], 0.0)


def test_test_rule_is_what_is_evaluated_and_exported(tiny: MakeConfig) -> None:
    """Head 1, the mean over both branches, folded into one linear layer."""
    config = tiny({"method.name": GREEDY, "optim.lr": 0.01})
    trainer = Trainer(config, start_ranks(config))
    trainer.fit()
    images = trainer.setup.dataset.images[:7]
    views = network_input(
        torch.from_numpy(images),
        trainer.setup.dataset.mean,
        trainer.setup.dataset.std,
        torch.float32,
    )
    with torch.no_grad():
        logits, _ = trainer.algorithm.average.module(views)
        expected = logits.unflatten(1, (2, 2))[:, :, 1].mean(1)
        folded = trainer.algorithm.network()(views)
    torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-4)
    trained = load_model(config.run_dir)
    with torch.no_grad():
        torch.testing.assert_close(trained.module(views), expected, rtol=1e-4, atol=1e-4)
    trainer.close()


def tutorial() -> str:
    """The method that docs/methods.md builds."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]


@pytest.fixture
def tutorial_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_methods.py").write_text(tutorial())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    yield tmp_path
    METHODS.pop("my_methods.Aligned", None)


def test_method_of_the_tutorial_trains_and_resumes(tiny: MakeConfig, tutorial_module: Path) -> None:
    assert not re.findall(r"[\w.]*\._[a-z]\w*", tutorial()), "private names"
    changes = {"method.name": "my_methods.Aligned", "method.tau": 1.5, "train.steps": 40}
    unbroken = tiny({**changes, "output_dir": str(tutorial_module / "a")})
    summary = train(unbroken)
    found = rows(unbroken)
    assert found[-1]["loss"] < found[0]["loss"] and summary["top1"] > 40
    broken = tiny({**changes, "output_dir": str(tutorial_module / "b")})
    interrupted(broken, 23)
    assert_bit_equal(by_part(final_state(unbroken))["model"], by_part(final_state(broken))["model"])
    mean = by_part(final_state(unbroken))["method"]["mean"]
    assert mean.sum() == pytest.approx(1) and mean.std() > 0.01


def test_method_of_the_tutorial_as_a_command(
    train_command: Callable[..., Any], tutorial_module: Path
) -> None:
    done = train_command(
        "--config",
        "digits_lt/reversed",
        "method.name=my_methods.Aligned",
        "method.decay=0.5",
        "train.steps=3",
        "train.period=2",
        "data.batch_size=2",
        "distributed.engine=plain",
        "log.figures=false",
        "evaluate.shares_images=0",
        env={"PYTHONPATH": str(tutorial_module)},
    )
    assert done.returncode == 0, done.stderr
    assert "my_methods.Aligned" in done.stderr + done.stdout


def test_needs_that_a_mode_cannot_meet_are_one_line(tiny: MakeConfig) -> None:
    confident = {"train.weak_forward": "no_grad", "train.strong_forward": "confident"}
    config = tiny({"method.name": GREEDY, **confident})
    with pytest.raises(ConfigError, match=r"Greedy looks at; set train\.strong_forward=all"):
        Trainer(config, start_ranks(config), write=False)
    config = tiny({"method.name": GREEDY, "model.name": "timm/resnet18"})
    with pytest.raises(ConfigError, match=r"batch norms before the pool, which works in"):
        Trainer(config, start_ranks(config), write=False)


def test_resume_with_another_method_is_one_line(tiny: MakeConfig) -> None:
    train(tiny({"method.name": GREEDY, "optim.lr": 0.01}))
    with pytest.raises(ConfigError, match=r"method\.name: 'tests.*Greedy' -> 'simpro'") as caught:
        Trainer(tiny({"optim.lr": 0.01}), start_ranks(tiny()))
    assert "\n" not in str(caught.value)


def test_registered_name(tiny: MakeConfig) -> None:
    register_method("greedy", Greedy)
    try:
        config = tiny({"method.name": "greedy", "method.branches": 0})
        trainer = Trainer(config, start_ranks(config), write=False)
        trainer.train_step()
        trainer.close()
        with pytest.raises(ConfigError, match="'greedy' already"):
            register_method("greedy", Greedy)
        with pytest.raises(ConfigError, match=r"method\.branches"):
            tiny({"method.name": "greedy", "method.branches": -1})
    finally:
        METHODS.pop("greedy", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("simprow", "did you mean 'simpro'"),
        ("no_such_package.Method", "there is no module no_such_package"),
        ("tests.conftest.ROOT", "tests.conftest has no class ROOT"),
        ("tests.conftest.Missing", "tests.conftest has no class Missing"),
        ("tests.conftest.pytest_configure", "must be a subclass of"),
        ("os.system('x').a", "is not one of"),
        ("", "is not one of"),
    ],
)
def test_name_that_means_no_method(tiny: MakeConfig, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        tiny({"method.name": name})
    assert "\n" not in str(caught.value)


def test_option_of_another_method_is_named(tiny: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny({"method.name": "fixmatch", "method.tau": 1.0})
    assert str(caught.value).startswith("method.tau is an option of simpro")
    assert "not of fixmatch" in str(caught.value) and "its options: hard" in str(caught.value)


def test_checkpoint_imports_nothing(tiny: MakeConfig, tutorial_module: Path) -> None:
    """A stranger's checkpoint that names a module of one's own does not run it."""
    train(tiny())
    state = final_state(tiny())
    state["config"]["method"]["name"] = "my_methods.Aligned"
    check_state(tutorial_module, state)
    assert "my_methods" not in sys.modules


def test_compiled_method_is_one_graph(tiny: MakeConfig, tutorial_module: Path) -> None:
    config = tiny({"method.name": "my_methods.Aligned"})
    trainer = Trainer(config, start_ranks(config), write=False)
    method: Method = trainer.algorithm.method
    given: list[dict[str, Any]] = []
    method.register_forward_pre_hook(lambda _, __, named: given.append(named), with_kwargs=True)
    trainer.train_step()
    explained = torch._dynamo.explain(method.forward)(**given[0])
    assert explained.graph_break_count == 0
    trainer.close()
