"""Cross-entropy with a log-prior: loss and gradient against the definition in float64."""

import pytest
import torch
from oracles import DTYPES
from simpro_kernels import AdjustedCrossEntropy, adjusted_cross_entropy


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tau", [0.0, 2.0])
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("num_classes", [1, 3, 10, 1000])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_loss_and_gradient_are_those_of_the_definition(
    dtype: str, num_classes: int, views: int, tau: float, reduction: str, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    kind = {**DTYPES, "fp64": torch.float64}[dtype]
    logits = (3 * torch.randn(views * 7, num_classes, generator=generator)).to(device, kind)
    targets = torch.randint(num_classes, (7,), generator=generator).to(device)
    targets[1::4] = -100
    prior = tau * torch.randn(num_classes, generator=generator).log_softmax(0).to(device)
    own, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = adjusted_cross_entropy(own, targets, prior if tau else None, reduction=reduction)

    ignored = (targets == -100).repeat(views)
    z = exact + prior.double()
    index = targets.clamp(min=0).repeat(views)[:, None]
    rows = (z.logsumexp(1) - z.gather(1, index)[:, 0]) * ~ignored
    expected = rows if reduction == "none" else rows.sum() / (~ignored).sum()
    incoming = torch.randn(expected.shape, generator=generator).to(device)  # not 1
    (loss * incoming.to(loss.dtype)).sum().backward()
    (expected * incoming.double()).sum().backward()
    assert own.grad is not None and exact.grad is not None
    assert loss.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    rtol = 1e-12 if dtype == "fp64" else 1e-5
    torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=rtol)
    rtol = {"fp64": 1e-12, "fp32": 1e-5}.get(dtype, torch.finfo(kind).eps)
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=rtol, atol=min(rtol, 1e-6))
    assert (own.grad[ignored] == 0).all()


def test_every_impl_is_eager_or_compiled(device: torch.device) -> None:
    """One `impl` goes to both losses, and this one has no kernel."""
    logits, targets = torch.randn(6, 4, device=device), torch.tensor([1, 3], device=device)
    losses = [adjusted_cross_entropy(logits, targets, None, impl=i) for i in ("triton", "eager")]
    assert torch.equal(*losses)


@pytest.mark.parametrize("num_images", [0, 3])
def test_nothing_to_average_is_zero(num_images: int, device: torch.device) -> None:
    logits = torch.randn(2 * num_images, 4, device=device, requires_grad=True)
    targets = torch.full((num_images,), -100, device=device)
    loss = adjusted_cross_entropy(logits, targets, None)
    loss.backward()
    assert loss == 0
    assert logits.grad is not None and (logits.grad == 0).all()


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_target_that_names_no_class_poisons_its_rows_only(bad: int, device: torch.device) -> None:
    logits = torch.randn(6, 5, device=device, requires_grad=True)
    targets = torch.tensor([1, bad, -100], device=device)
    rows = adjusted_cross_entropy(logits, targets, None, reduction="none")
    rows.sum().backward()
    assert rows.isnan().tolist() == [False, True, False] * 2
    assert logits.grad is not None
    assert logits.grad.isnan().any(1).tolist() == [False, True, False] * 2
    assert adjusted_cross_entropy(logits, targets, None).isnan()


def test_float16_mean_gradient_does_not_underflow(device: torch.device) -> None:
    """1/1024 times a probability of 4e-5 is below float16; the loss scale comes first."""
    logits = torch.zeros(1024, 2, dtype=torch.float16, device=device)
    logits[:, 0] = 10.0
    logits.requires_grad_()
    targets = torch.zeros(1024, dtype=torch.int64, device=device)
    (adjusted_cross_entropy(logits, targets, None) * 2.0**16).backward()
    expected = 2.0**16 / 1024 * torch.tensor([-10.0]).exp()
    assert logits.grad is not None
    torch.testing.assert_close(
        logits.grad[:, 1].float().cpu(), expected.expand(1024), rtol=0.02, atol=0
    )


def test_module_is_the_function(device: torch.device) -> None:
    logits = torch.randn(4, 3, device=device)
    targets = torch.tensor([0, -1], device=device)
    prior = torch.tensor([0.5, 0.25, 0.25], device=device).log()
    options = {"ignore_index": -1, "reduction": "none"}
    module = AdjustedCrossEntropy(**options)
    want = adjusted_cross_entropy(logits, targets, prior, **options)
    assert torch.equal(module(logits, targets, prior), want)
    assert "reduction='none'" in repr(module)
