"""`train.compile`: the same numbers, static shapes, and what is refused."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpro_fast import FixMatch, SimPro
from simpro_fast.config import Config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.training.engine import compile as compilation
from simpro_fast.training.trainer import Trainer
from tests.training.test_trainer import synthetic

MakeConfig = Callable[..., Config]
NO_GRAD = {"train.weak_forward": "no_grad"}
# All images pass: else a compiled step fills up its sevenths, which batch norm sees.
CONFIDENT = {**NO_GRAD, "train.strong_forward": "confident", "method.threshold": 0.0}
FORWARD: list[dict[str, Any]] = [{}, NO_GRAD, CONFIDENT]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def steps(config: Config, number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = Trainer(config, start_ranks(config), make_loader=synthetic(), write=False)
    losses = []
    for _ in range(number):
        trainer.train_step()
        losses.append(trainer.meter.sums[0].item())
    trainer.close()
    return losses, trainer.algorithm.method.state_dict()


@needs_compiler
@pytest.mark.parametrize("kind", [SimPro, FixMatch])
def test_method_is_one_graph_with_the_same_results(tiny: MakeConfig, kind: type) -> None:
    """`fullgraph`: a read or a branch on values inside would be an error here."""
    eager, compiled = (kind([40, 15, 5], strong_views=2, threshold=0.6) for _ in range(2))
    compilation.compile_method(compiled, tiny({"train.compile": "default"}))
    g = torch.Generator().manual_seed(0)
    logits = [2 * torch.randn(rows, 3, generator=g) for rows in (8, 6, 12)]
    targets = torch.tensor([0, 1, 2, 0])
    gradients = []
    for method in (eager, compiled):
        labeled, weak, strong = (z.clone().requires_grad_() for z in logits)
        out = method(labeled, targets, weak, strong)
        out.loss.backward()
        gradients.append((out, labeled.grad, strong.grad))
    (a, *expected), (b, *found) = gradients
    for name in vars(a):
        torch.testing.assert_close(getattr(b, name), getattr(a, name), msg=name)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(compiled.unlabeled_mass, eager.unlabeled_mass)
    assert torch.equal(compiled.labeled_count, eager.labeled_count)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("changes", FORWARD)
def test_compiled_steps_are_the_eager_ones(tiny: MakeConfig, changes: dict[str, Any]) -> None:
    """SiLU, since LeakyReLU's kinks turn rounding into other gradients."""
    changes = {**changes, "model.activation": "silu"}
    eager, priors = steps(tiny(changes), 4)
    compiled, found = steps(tiny({**changes, "train.compile": "default"}), 4)
    assert compiled == pytest.approx(eager, rel=1e-4)
    torch.testing.assert_close(found["unlabeled_mass"], priors["unlabeled_mass"], rtol=1e-3, atol=0)


@needs_compiler
def test_many_phases_and_runs_in_one_process_compile(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps so many versions of a function: it refuses another one of what must be one graph,
    and leaves others uncompiled."""
    graphs: list[Any] = []
    compile_module = torch.nn.Module.compile

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(compile_module, backend=backend)
    )
    with torch._dynamo.config.patch(recompile_limit=2):
        phases = {"method.name": "crest_plus", "method.generations": 4, "train.period": 1}
        steps(tiny({**phases, "train.compile": "default"}), 4)
        graphs.clear()
        for run in range(4):
            own = {"methods.simpro.tau": 1.0 + run, "model.bn_momentum": 0.1 + 0.01 * run}
            steps(tiny({**own, "train.compile": "default"}), 1)
    assert len(graphs) == 2 * 4  # network and method


@pytest.mark.gpu
@pytest.mark.parametrize("changes", FORWARD)
def test_cuda_graphs_give_the_eager_steps(tiny: MakeConfig, changes: dict[str, Any]) -> None:
    exact = {"train.tf32": False, "train.cudnn_benchmark": False}
    changes = {**changes, **exact, "device": "cuda", "model.activation": "silu"}
    eager, _ = steps(tiny(changes), 6)
    graphs, _ = steps(tiny({**changes, "train.compile": "cuda-graphs"}), 6)
    assert graphs == pytest.approx(eager, rel=1e-3)
