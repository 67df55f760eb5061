"""ADELLO against loops written from its formulas, losses and gradients, in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simpro_fast.config.methods import ADELLOConfig
from simpro_fast.methods import ADELLO
from tests.equality import assert_bit_equal
from tests.methods.oracles import micro_batches, softmax
from tests.methods.settings import setting

COUNTS = (40, 15, 5)
KEYS: dict[str, Any] = {"threshold": 0.6, "estimate_decay": 0.9, "power_min": 0.1}


def draws(seed: int, classes: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int, lean: Any = 0) -> Tensor:
        return (torch.randn(rows, classes, generator=g).double() + lean).requires_grad_()

    targets = torch.randint(classes, (12,), generator=g)
    targets[3::4] = -100  # a quarter of every micro-batch
    # Most images look like the last class at first, and like the first one in the end.
    lean = torch.linspace(-1, 1, classes, dtype=torch.float64) * (3 - seed / 10)
    given = {"logits_labeled": logits(24), "logits_weak": logits(12, lean)}
    return {"targets": targets, **given, "logits_strong": logits(24)}


def slow_loss(rows: Any, heats: list[float], shift: list[float], targets: Any, over: int) -> Any:
    """Sum of CE(row / heat + shift, target) / over, and its gradient; a row may have no target."""
    loss, gradient = 0.0, []
    for i, row in enumerate(rows):
        heat, target = heats[i % len(heats)], targets[i % len(targets)]
        q = softmax([v / heat + s for v, s in zip(row, shift, strict=True)])
        if target:
            loss -= sum(t * math.log(v) for t, v in zip(target, q, strict=True)) / over
        gradient.append([(v - t) / heat / over for t, v in zip(target or q, q, strict=True)])
    return loss, gradient


def slow_step(given: dict[str, Tensor], counts: Any, p: list[float], t: int, heat: Any) -> Any:
    """By KEYS and alpha 1/2: losses, slopes, mask, labels, next p; heat: T_d, None in phase 0."""
    y, labeled, weak, strong = (v.tolist() for v in given.values())
    classes = range(len(p))
    one_hot = [[float(j == k) for j in classes] for k in classes]
    a = 1 - (1 - 0.1) * (t / 60) ** 2
    log_q = [math.log(v**a / sum(w**a for w in p)) for v in p]
    shift = [math.log(max(counts[k], 1)) - log_q[k] for k in classes]  # pi_l up to a factor
    hard = [one_hot[k] if k >= 0 else None for k in y]
    loss_labeled, slope = slow_loss(labeled, [1.0], shift, hard, len(labeled) * 3 // 4)
    mask = [max(softmax(w)) >= 0.6 for w in weak]
    labels = [w.index(max(w)) for w in weak]
    soft = [softmax([v / heat for v in w]) if heat else None for w in weak]
    mixed = [one_hot[k] if m else s for k, m, s in zip(labels, mask, soft, strict=True)]
    heats = [1.0 if m else heat or 1.0 for m in mask]
    shift = [math.log(p[k]) - log_q[k] for k in classes]
    loss_unlabeled, strong_slope = slow_loss(strong, heats, shift, mixed, len(strong))
    p = [0.9 * p[k] + 0.1 * sum(softmax(w)[k] for w in weak) / len(weak) for k in classes]
    losses = [loss_labeled, loss_unlabeled, loss_labeled / 2 + loss_unlabeled]
    return losses, [[v / 2 for v in row] for row in slope], strong_slope, mask, labels, p


def close(found: Tensor | None, expected: Any) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("parts", "counts"), [(1, COUNTS), (3, COUNTS), (3, (30, 0, 12))])
def test_losses_gradients_and_estimate_over_the_run(parts: int, counts: tuple[int, ...]) -> None:
    """Also where the step comes in micro-batches; phase 1 begins at period 3 of 12."""
    method = ADELLO(ADELLOConfig(**KEYS), setting(counts, alpha=0.5))
    p, heat, kept = [1 / 3] * 3, None, 0
    for step in range(60):
        if method.phase != method.phase_at(step // 5):
            method.phase = method.phase_at(step // 5)
            assert method.enter_phase(1, None) is None  # type: ignore[arg-type]
            heat = math.exp(sum(v * math.log(v * 3) for v in p))
            assert heat > 1.2
        assert method.phase == (step >= 15)
        close(method.normalised_pi_u(), p)
        given = draws(step)
        outs = [method(**small) for small in micro_batches(given, parts)]
        found = sum(torch.stack([o.loss_labeled, o.loss_unlabeled, o.loss]) for o in outs) / parts
        found[2].backward()
        losses, slope, strong_slope, mask, labels, p = slow_step(given, counts, p, step, heat)
        close(found.detach(), losses)
        close(given["logits_labeled"].grad, slope)
        close(given["logits_strong"].grad, strong_slope)
        assert given["logits_weak"].grad is None
        assert torch.cat([o.mask for o in outs]).tolist() == mask
        assert torch.cat([o.pseudo_labels for o in outs]).tolist() == labels
        method.eval()(**draws(step + 100))  # counts nothing
        method.train().end_step(step)
        if step % 5 == 4:
            method.end_period()
        kept += sum(mask)
    close(method.normalised_pi_u(), p)
    assert 0.2 < kept / (60 * 12) < 0.8


@pytest.mark.parametrize(("after", "first"), [(0.0, 0), (0.2, 3), (0.25, 3), (1.0, 12)])
def test_phases(after: float, first: int) -> None:
    method = ADELLO(ADELLOConfig(distill_after=after), setting(COUNTS))
    assert [method.phase_at(p) for p in range(13)] == [int(p >= first) for p in range(13)]


# Without memory, the estimate of images that are all surely of one class has zeros.
@pytest.mark.parametrize(("phase", "decay"), [(0, 0.9), (1, 0.9), (1, 0.0)])
@pytest.mark.parametrize("case", ["nothing confident", "one class", "one class guessed"])
def test_degenerate_steps_stay_finite(case: str, phase: int, decay: float) -> None:
    surely = torch.tensor([[1e4, 0, 0]] * 12, dtype=torch.float64)
    counts, bound, given = {
        "nothing confident": (COUNTS, 1.01, {"targets": torch.full((12,), -100)}),
        "one class": ((7,), 0.6, {"targets": torch.zeros(12, dtype=torch.int64)}),
        "one class guessed": ((3, 0, 9), 0.6, {"logits_weak": surely}),
    }[case]
    method = ADELLO(ADELLOConfig(threshold=bound, estimate_decay=decay), setting(counts))
    for step in range(3):
        if phase and step == 1:
            method.phase = 1
            method.enter_phase(1, None)  # type: ignore[arg-type]
        batch = draws(step, len(counts)) | given
        out = method(**batch)
        out.loss.backward()
        method.end_step(step)
        found = [out.loss, batch["logits_strong"].grad, method.normalised_pi_u()]
        assert all(v.isfinite().all() for v in found)
        assert out.mask.tolist() == [case != "nothing confident"] * 12
        assert out.loss.item() == 0 or case == "one class guessed" or method.phase


def test_state_goes_on_within_a_period_of_either_phase() -> None:
    methods = [ADELLO(ADELLOConfig(**KEYS), setting(COUNTS)) for _ in range(3)]
    for step in range(22):
        if step in (8, 18):
            methods[step // 8].load_state_dict(methods[0].state_dict())
        losses = []
        for method in methods[: 1 + (step >= 8) + (step >= 18)]:
            method.phase = int(step >= 15)
            if step == 15:  # not again where a run resumes in the phase
                method.enter_phase(1, None)  # type: ignore[arg-type]
            losses.append(method(**draws(step)).loss)
            method.end_step(step)
            assert_bit_equal(losses[-1], losses[0])
            assert_bit_equal(dict(method.state_dict()), dict(methods[0].state_dict()))
