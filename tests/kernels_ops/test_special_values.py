"""-inf logits and priors, NaN and infinities: never a silently dropped row."""

import math

import pytest
import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy

pytestmark = pytest.mark.usefixtures("nan_in_empty_memory")
IMPLS = pytest.mark.parametrize("impl", ["triton", "eager"])
INF = math.inf


def _pseudo(weak, strong, impl, threshold=0.5, priors=(None, None), **options):  # type: ignore[no-untyped-def]
    strong = strong.clone().requires_grad_()
    out = pseudo_label_cross_entropy(
        weak, strong, *priors, threshold, reduction="none", impl=impl, **options
    )
    out.loss.sum().backward()
    return out, strong.grad


@IMPLS
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    ("num_classes", "at"), [(1000, 0), (1000, 500), (1000, 999), (4000, 0), (4000, 2500)]
)
def test_a_single_finite_logit(
    num_classes: int, at: int, hard: bool, impl: str, device: torch.device
) -> None:
    """Every other block is -inf: running maximum minus running maximum must not be NaN."""
    logits = torch.full((1, num_classes), -INF, device=device)
    logits[0, at] = 2.0
    out, grad = _pseudo(logits, logits, impl, hard=hard)
    assert out.loss.tolist() == [0.0] and out.max_prob.tolist() == [1.0]
    assert (grad == 0).all()


@IMPLS
@pytest.mark.parametrize("in_prior", [False, True], ids=["logits", "prior"])
def test_no_mass_on_a_class_that_is_minus_inf_gives_the_entropy(
    in_prior: bool, impl: str, device: torch.device
) -> None:
    """[10, -inf, 0] against its own softmax, where torch's soft cross-entropy is NaN."""
    logits = torch.tensor([[10.0, 0.0 if in_prior else -INF, 0.0]], device=device)
    prior = torch.tensor([0.0, -INF, 0.0], device=device) if in_prior else None
    out, grad = _pseudo(logits, logits, impl, priors=(prior, prior))
    assert abs(float(out.loss) - 4.99e-4) < 1e-5
    assert torch.isfinite(grad).all()


@IMPLS
@pytest.mark.parametrize("num_classes", [3, 2500])
def test_mass_on_a_class_that_is_minus_inf_gives_inf(
    num_classes: int, impl: str, device: torch.device
) -> None:
    weak = torch.zeros(1, num_classes, device=device)
    weak[0, 2] = 20.0
    strong = torch.zeros(1, num_classes, device=device)
    strong[0, 2] = -INF
    for hard in (False, True):
        out, grad = _pseudo(weak, strong, impl, hard=hard)
        assert out.loss.tolist() == [INF]
        assert torch.isfinite(grad).all()
        assert abs(float(grad[0, 2]) + 1) < 1e-4


def _invalid_row(kind: str, num_classes: int) -> torch.Tensor:
    row = torch.zeros(num_classes)
    if kind == "all -inf":
        return row - INF
    row[num_classes - 1] = {"nan": math.nan, "inf": INF}[kind]
    return row


@IMPLS
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("num_classes", [3, 2500])
@pytest.mark.parametrize("kind", ["nan", "inf", "all -inf"])
def test_invalid_weak_row_poisons_its_own_rows(
    kind: str, num_classes: int, hard: bool, impl: str, device: torch.device
) -> None:
    weak = torch.zeros(3, num_classes)
    weak[0, 1] = weak[2, 1] = 20.0
    weak[1] = _invalid_row(kind, num_classes)
    weak = weak.to(device)
    strong = torch.zeros(6, num_classes, device=device)
    out, grad = _pseudo(weak, strong, impl, hard=hard)
    assert out.loss.isnan().tolist() == [False, True, False] * 2
    assert grad.isnan().all(1).tolist() == [False, True, False] * 2
    assert grad.isnan().any(1).tolist() == [False, True, False] * 2
    assert out.mask.tolist() == [True, False, True]
    assert out.max_prob.isnan().tolist() == [False, True, False]
    # The poisoned image adds nothing to the class statistics; the loss tells of it.
    assert abs(float(out.class_mass.sum()) - 2) < 1e-4
    mean = pseudo_label_cross_entropy(weak, strong, None, None, 0.5, hard=hard, impl=impl)
    assert mean.loss.isnan()


@IMPLS
@pytest.mark.parametrize("num_classes", [3, 2500])
@pytest.mark.parametrize("kind", ["nan", "inf", "all -inf"])
def test_invalid_strong_row_counts_where_the_image_is_kept(
    kind: str, num_classes: int, impl: str, device: torch.device
) -> None:
    weak = torch.zeros(2, num_classes)
    weak[0, 0] = 20.0
    strong = torch.zeros(4, num_classes)
    strong[:2] = _invalid_row(kind, num_classes)
    out, grad = _pseudo(weak.to(device), strong.to(device), impl)
    assert out.mask.tolist() == [True, False]
    assert out.loss.isnan().tolist() == [True, False, False, False]
    assert grad[0].isnan().all() and torch.isfinite(grad[1:]).all()
    assert (grad[1] == 0).all() and out.loss[1] == 0


@pytest.mark.parametrize("kind", ["nan", "inf", "all -inf"])
def test_invalid_labeled_row_counts_unless_ignored(kind: str, device: torch.device) -> None:
    logits = torch.zeros(3, 3)
    logits[:2] = _invalid_row(kind, 3)
    logits = logits.to(device).requires_grad_()
    targets = torch.tensor([0, -100, 0], device=device)
    loss = adjusted_cross_entropy(logits, targets, None, reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [True, False, False] and loss[1] == 0
    assert logits.grad is not None
    assert logits.grad[0].isnan().any() and (logits.grad[1] == 0).all()
    assert torch.isfinite(logits.grad[2]).all()


def test_minus_inf_in_a_labeled_row(device: torch.device) -> None:
    """Of another class it costs nothing, in the prior as in the logits; of the target infinity."""
    logits = torch.tensor([[10.0, -INF, 0.0]], device=device)
    prior = torch.tensor([0.0, -INF, 0.0], device=device)
    for z, a in ((logits, None), (logits.clamp(min=0), prior)):
        losses = [adjusted_cross_entropy(z, torch.tensor([k], device=device), a) for k in (0, 1)]
        assert abs(float(losses[0]) - 4.54e-5) < 1e-6 and losses[1] == INF


@IMPLS
def test_large_logits_do_not_overflow(impl: str, device: torch.device) -> None:
    logits = torch.tensor([[6e4, -6e4, 5.9e4]], dtype=torch.float16, device=device)
    out, grad = _pseudo(logits, -logits, impl)
    assert abs(float(out.loss) - 1.2e5) < 100
    assert torch.isfinite(grad).all()
