"""Views to logits: the passes of every mode, batch norm between them, and what is left out."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from simpro_fast import FixMatch, SimPro
from simpro_fast.config import parse_config
from simpro_fast.config.schema import TrainConfig
from simpro_fast.methods import MethodOutput
from simpro_fast.training.engine.base import Engine
from simpro_fast.training.step import WeakPass, forward_views, weak_pass
from simpro_fast.utils.errors import ConfigError

LABELED, IMAGES, VIEWS, CLASSES = 4, 10, 2, 3
ROWS = [LABELED, IMAGES, VIEWS * IMAGES]
MODES = {
    "concat": TrainConfig(),
    "no_grad": TrainConfig(weak_forward="no_grad"),
    "confident": TrainConfig(weak_forward="no_grad", strong_forward="confident"),
    "compiled": TrainConfig(weak_forward="no_grad", strong_forward="confident", compile="default"),
}


class RecordingEngine:
    """Forward only, without an optimizer; `passes` holds (rows, with a graph) of every call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.passes: list[tuple[int, bool]] = []

    def forward(self, views: Tensor) -> tuple[Tensor, None]:
        self.passes.append((len(views), torch.is_grad_enabled()))
        assert views.is_contiguous(memory_format=torch.channels_last)
        return self.module(views), None


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.1), nn.SiLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8 * 36, CLASSES)).double()


def batch() -> Tensor:
    g = torch.Generator().manual_seed(1)
    views = torch.randn(sum(ROWS), 3, 8, 8, generator=g, dtype=torch.float64)
    return views.contiguous(memory_format=torch.channels_last)


def simpro(threshold: float) -> SimPro:
    return SimPro([5, 3, 2], 1.0, threshold, strong_views=VIEWS)


def run(
    mode: str, model: nn.Module, views: Tensor, method: Any
) -> tuple[MethodOutput, list[tuple[int, bool]]]:
    """One step up to the gradients; the passes it took."""
    engine: Any = RecordingEngine(model)
    weak_first = weak_pass(engine, method, ROWS, MODES[mode], views)
    images = None if weak_first is None else weak_first.images()
    passes = forward_views(engine, ROWS, views, weak_first, images)
    labeled, weak, strong = (logits for logits, _ in passes)
    out: MethodOutput = method(labeled, torch.arange(LABELED) % CLASSES, weak, strong)
    out.loss.backward()
    return out, engine.passes


def threshold_keeping(kept: int) -> float:
    """Between the confidences of the kept and the next image under frozen batch norm."""
    with torch.no_grad():
        weak = network().eval()(batch()[LABELED : LABELED + IMAGES])
    method = simpro(0.5)
    prior, _ = method.adjustments(torch.float64)
    top = (weak + prior).softmax(1).amax(1).sort(descending=True).values
    return float((top[kept - 1] + top[kept]) / 2)


@pytest.mark.parametrize("mode", list(MODES))
def test_passes_and_the_same_gradients_where_batch_norm_is_frozen(mode: str) -> None:
    """Without batch statistics no row knows of another, so every mode is the published step."""
    threshold = threshold_keeping(5)
    model = network().eval()
    reference = copy.deepcopy(model)
    expected, _ = run("concat", reference, batch(), simpro(threshold))
    method = simpro(threshold)
    found, passes = run(mode, model, batch(), method)
    second = {"no_grad": VIEWS * IMAGES, "confident": VIEWS * 5, "compiled": VIEWS * 6}
    if mode == "concat":
        assert passes == [(sum(ROWS), True)]
    else:
        assert passes == [(IMAGES, False), (LABELED + second[mode], True)]
    assert int(found.mask.sum()) == 5
    for name in ("loss", "loss_labeled", "loss_unlabeled", "mask_rate", "class_mass"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert method.unlabeled_mass.sum() == pytest.approx(float(expected.class_mass.sum()))


def test_strong_views_that_fail_the_mask_are_not_run() -> None:
    views, threshold = batch(), threshold_keeping(4)
    method = simpro(threshold)
    mask = run("concat", network().eval(), views, method)[0].mask
    views[LABELED + IMAGES :][~mask.repeat(VIEWS)] = torch.nan
    model = network().train()
    # The rows that are run come from a network in training: NaN in one would be in all of them.
    model[1].eval()
    out, _ = run("confident", model, views, method)
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("threshold", [1.01, 0.0])
def test_nobody_and_everybody_confident(threshold: float) -> None:
    """An all-masked step has an unlabeled loss of 0 and gradients from the labeled."""
    model = network()
    out, passes = run("confident", model, batch(), simpro(threshold))
    strong = 0 if threshold > 1 else VIEWS * IMAGES
    assert passes[1] == (LABELED + strong, True)
    assert (float(out.loss_unlabeled) == 0) == (threshold > 1)
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("images", [1, 10, 64, 448])
def test_few_shapes_that_hold_all_images_that_pass(images: int) -> None:
    shapes = set()
    for passing in range(images + 1):
        order = torch.randperm(images)
        weak = WeakPass((order, None), order, torch.tensor(passing), -(-images // 7))
        chosen = weak.images()
        assert chosen is not None and torch.equal(chosen, order[: len(chosen)])
        assert passing <= len(chosen) <= max(1, passing) + images / 7 + 1
        shapes.add(len(chosen))
    assert len(shapes) <= 7 and max(shapes) == images


@pytest.mark.parametrize("mode", ["no_grad", "confident", "compiled"])
def test_running_statistics_move_once_towards_both_passes(mode: str) -> None:
    """With momentum m: (1 - m) old + m (mean of the passes, weighted by the published rows)."""
    model, views = network(), batch()
    views[LABELED : LABELED + IMAGES] += 1.0
    norm, conv = model[1], model[0]
    run(mode, model, views, simpro(0.0))
    with torch.no_grad():
        pixels = conv(views).transpose(0, 1)
    weak = pixels[:, LABELED : LABELED + IMAGES].flatten(1)
    others = torch.cat([pixels[:, :LABELED], pixels[:, LABELED + IMAGES :]], 1).flatten(1)
    share = IMAGES / sum(ROWS)
    mean = share * weak.mean(1) + (1 - share) * others.mean(1)
    variance = share * weak.var(1) + (1 - share) * others.var(1)
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variance)
    assert norm.momentum == 0.1, "the momentum is the network's own again"


@pytest.mark.parametrize("kind", [SimPro, FixMatch])
def test_confident_is_the_mask_of_the_method(kind: type) -> None:
    method = kind([40, 15, 5], threshold=0.7, strong_views=1)
    g = torch.Generator().manual_seed(3)
    weak = 2 * torch.randn(200, 3, generator=g)
    mask = method(weak[:2], torch.tensor([0, 1]), weak, weak).mask
    assert 0 < mask.sum() < 200
    assert torch.equal(method.confident(weak), mask)
    assert not method.confident(torch.full((1, 3), torch.nan)).any()


@pytest.mark.parametrize("kind", [SimPro, FixMatch])
def test_confident_has_a_margin_below_the_threshold_for_rounding(kind: type) -> None:
    weak = torch.tensor([[2.0, 0.5, -1.0]])
    method = kind([40, 15, 5], threshold=0.5, strong_views=1)
    probability = float(method.pseudo_labels(weak).probability)

    def at(threshold: float) -> tuple[bool, bool]:
        method.threshold = threshold
        mask = method(weak, torch.tensor([0]), weak, weak).mask
        return bool(mask), bool(method.confident(weak))

    assert at(probability * (1 - 1e-4)) == (True, True)
    assert at(probability * (1 + 5e-6)) == (False, True)
    assert at(probability * (1 + 1e-4)) == (False, False)


def test_torch_compile_keeps_all_shapes() -> None:
    """Beyond the limit it would run what follows eagerly, with a warning at most."""
    model, counter = network(), CompileCounter()
    model.compile(backend=counter, dynamic=False)
    engine, rows = cast(Engine, RecordingEngine(model)), [LABELED, 14, 28]
    views = batch().repeat(2, 1, 1, 1)[: sum(rows)].contiguous(memory_format=torch.channels_last)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for passing in [*range(15), *range(15)]:
            weak = weak_pass(engine, simpro(0.5), rows, MODES["compiled"], views)
            assert weak is not None
            images = replace(weak, passing=torch.tensor(passing)).images()
            (_, (strong, _)) = forward_views(engine, rows, views, weak, images)[1:]
            strong.sum().backward()
    assert counter.frame_count == 1 + 7


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="weak_forward=no_grad"):
        parse_config({"name": "x", "train": {"strong_forward": "confident"}})
