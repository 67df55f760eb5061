"""Cross-entropy with a log-prior: loss and gradient against float64."""

import itertools

import pytest
import torch
from oracles import (
    DTYPES,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    assert_three_way,
    run_adjusted,
)
from simpro_kernels import AdjustedCrossEntropy, adjusted_cross_entropy
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("nan_in_empty_memory")

_CYCLES = zip(
    itertools.cycle(DTYPES),
    itertools.cycle((2, 1)),
    itertools.cycle((1.0, 0.0, 2.0, 1.0, 2.0)),
    itertools.cycle(("mean", "none", "mean")),
    strict=False,
)
CASES = [
    (images, classes, *options)
    for (images, classes), options in zip(
        [
            *itertools.product((0, 1, 5, 63, 512), (1, 2, 3, 10)),
            *itertools.product((1, 5, 63), (100, 127, 1000, 1025)),
            *itertools.product((1, 5), (2500,)),
            *itertools.product((11, 12, 13), (10,)),
        ],
        _CYCLES,
        strict=False,
    )
]


@pytest.mark.parametrize(("images", "classes", "dtype", "views", "tau", "reduction"), CASES)
def test_three_way(
    images: int,
    classes: int,
    dtype: str,
    views: int,
    tau: float,
    reduction: str,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(images + 1000 * classes)
    logits = 3 * torch.randn(views * images, classes, generator=generator)
    logits = logits.to(DTYPES[dtype]).to(device)
    targets = torch.randint(classes, (images,), generator=generator)
    targets[1::4] = -100
    targets = targets.to(device)
    prior = None
    if tau:
        prior = tau * torch.randn(classes, generator=generator).log_softmax(0).to(device)
    shape = () if reduction == "mean" else (views * images,)
    incoming = torch.randn(shape, generator=generator).to(device)
    results = [
        run_adjusted(logits, targets, prior, incoming, impl, reduction=reduction)
        for impl in ("triton", "eager", "fp64")
    ]
    losses, grads = zip(*results, strict=True)
    assert losses[0].dtype == torch.float32 and grads[0].dtype == logits.dtype
    assert_three_way("loss", *losses, rtol=LOSS_TOLERANCE)
    assert_three_way("gradient", *grads, rtol=GRADIENT_TOLERANCE[logits.dtype])
    ignored = (targets == -100).repeat(views)
    assert (grads[0][ignored] == 0).all()


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_without_prior_it_is_the_cross_entropy_of_torch(impl: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 7, generator=generator).to(device)
    targets = torch.tensor([0, 6, -1, 3, 3, 2], device=device)
    got = adjusted_cross_entropy(logits, targets, None, ignore_index=-1, impl=impl)
    want = functional.cross_entropy(logits, targets.repeat(2), ignore_index=-1)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("num_images", [0, 3])
def test_nothing_to_average_is_zero(num_images: int, impl: str, device: torch.device) -> None:
    logits = torch.randn(2 * num_images, 4, device=device, requires_grad=True)
    targets = torch.full((num_images,), -100, device=device)
    loss = adjusted_cross_entropy(logits, targets, None, impl=impl)
    loss.backward()
    assert loss == 0
    assert logits.grad is not None and (logits.grad == 0).all()


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("num_classes", [5, 2500])
@pytest.mark.parametrize("bad", [-1, "K", 2**40])
def test_target_that_names_no_class_poisons_its_rows_only(
    bad: int | str, num_classes: int, impl: str, device: torch.device
) -> None:
    target = num_classes if bad == "K" else int(bad)
    logits = torch.randn(6, num_classes, device=device, requires_grad=True)
    targets = torch.tensor([1, target, -100], device=device)
    rows = adjusted_cross_entropy(logits, targets, None, reduction="none", impl=impl)
    rows.sum().backward()
    assert rows.isnan().tolist() == [False, True, False] * 2
    assert logits.grad is not None
    assert logits.grad.isnan().any(1).tolist() == [False, True, False] * 2
    mean = adjusted_cross_entropy(logits, targets, None, impl=impl)
    assert mean.isnan()


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_float16_mean_gradient_does_not_underflow(impl: str, device: torch.device) -> None:
    """1/1024 times a probability of 4e-5 is below float16; the loss scale comes first."""
    logits = torch.zeros(1024, 2, dtype=torch.float16, device=device)
    logits[:, 0] = 10.0
    logits.requires_grad_()
    targets = torch.zeros(1024, dtype=torch.int64, device=device)
    (adjusted_cross_entropy(logits, targets, None, impl=impl) * 2.0**16).backward()
    expected = 2.0**16 / 1024 * torch.tensor([-10.0]).exp()
    assert logits.grad is not None
    torch.testing.assert_close(
        logits.grad[:, 1].float().cpu(), expected.expand(1024), rtol=0.02, atol=0
    )


def test_module_is_the_function(device: torch.device) -> None:
    logits = torch.randn(4, 3, device=device)
    targets = torch.tensor([0, 2], device=device)
    prior = torch.tensor([0.5, 0.25, 0.25], device=device).log()
    module = AdjustedCrossEntropy(reduction="none", impl="triton")
    want = adjusted_cross_entropy(logits, targets, prior, reduction="none", impl="triton")
    assert torch.equal(module(logits, targets, prior), want)
    assert "reduction='none'" in repr(module)
