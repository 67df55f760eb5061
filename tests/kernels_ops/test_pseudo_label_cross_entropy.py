"""Loss, gradient and class mass of the kernel against float64."""

import itertools

import pytest
import torch
from oracles import (
    DTYPES,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    Case,
    assert_three_way,
    make_inputs,
    run_pseudo,
)
from simpro_kernels import PseudoLabelCrossEntropy, pseudo_label_cross_entropy

pytestmark = pytest.mark.usefixtures("nan_in_empty_memory")


def _sizes() -> list[Case]:
    """Every N with every small K, smaller N with larger K; the other options take turns.

    A K meets two combinations of dtype and mode, so that a device compiles few kernels.
    """
    numbers = {
        **dict.fromkeys((1, 2, 3, 10), (0, 1, 5, 63, 1000)),
        **dict.fromkeys((100, 127, 1000, 1025), (0, 1, 5, 63)),
        127: (0, 1, 5, 63, 130),
        1000: (0, 1, 5, 127),
        2500: (0, 1, 5, 17),
        21841: (2,),
    }
    views = itertools.cycle((2, 1, 3, 2, 2))
    taus = itertools.cycle((1.0, 2.0))
    reductions = itertools.cycle(("mean", "none", "mean"))
    cases = []
    for k_index, (num_classes, images) in enumerate(numbers.items()):
        for n_index, num_images in enumerate(images):
            turn = n_index % 2
            dtype = list(DTYPES)[(k_index + turn) % 3]
            options = next(views), dtype, next(taus), turn == 1, next(reductions)
            cases.append(Case(num_images, num_classes, *options))
    return cases


def _options() -> list[Case]:
    """The full product of the options, at one size."""
    return [
        Case(37, 10, views, dtype, tau, hard, reduction)
        for dtype, views, tau, hard, reduction in itertools.product(
            DTYPES, (1, 2, 3), (0.0, 1.0, 2.0), (False, True), ("mean", "none")
        )
    ]


@pytest.mark.parametrize("case", [*_sizes(), *_options()], ids=str)
def test_three_way(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    kernel, kernel_grad = run_pseudo(case, inputs, "triton")
    eager, eager_grad = run_pseudo(case, inputs, "eager")
    exact, exact_grad = run_pseudo(case, inputs, "fp64")
    assert torch.equal(kernel.mask, exact.mask)
    assert kernel.loss.dtype == torch.float32 and kernel.class_mass.dtype == torch.float32
    for name in ("loss", "class_mass", "max_prob"):
        values = (getattr(result, name) for result in (kernel, eager, exact))
        assert_three_way(name, *values, rtol=LOSS_TOLERANCE)
    tolerance = GRADIENT_TOLERANCE[inputs.strong.dtype]
    assert kernel_grad.dtype == inputs.strong.dtype
    assert_three_way("gradient", kernel_grad, eager_grad, exact_grad, rtol=tolerance)
    masked = ~exact.mask.repeat(case.num_views)
    assert (kernel_grad[masked] == 0).all()
    if case.reduction == "none":
        assert (kernel.loss[masked] == 0).all()


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_classes", [2, 4, 256, 4096])
def test_exactly_at_the_threshold_is_kept(
    num_classes: int, dtype: str, impl: str, device: torch.device
) -> None:
    """1 / K of equal logits, in each of the three kernels."""
    threshold = 1 / num_classes
    weak = torch.full((3, num_classes), 1.5, dtype=DTYPES[dtype], device=device)
    above = float(torch.nextafter(torch.tensor(threshold), torch.tensor(1.0)))
    at = pseudo_label_cross_entropy(weak, weak, None, None, threshold, impl=impl)
    over = pseudo_label_cross_entropy(weak, weak, None, None, above, impl=impl)
    assert at.mask.all() and not over.mask.any()
    assert (at.max_prob == threshold).all()


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_mask_is_made_in_float32(impl: str, device: torch.device) -> None:
    """0.9492 >= 0.95 holds in bfloat16, where both are 0.94922."""
    gap = torch.tensor(0.9492 / (1 - 0.9492)).log()
    prior = torch.tensor([0.0, -float(gap)], device=device)
    weak = torch.zeros(1, 2, dtype=torch.bfloat16, device=device)
    out = pseudo_label_cross_entropy(weak, weak, prior, None, 0.95, impl=impl)
    assert abs(float(out.max_prob) - 0.9492) < 1e-6
    assert not out.mask.any()


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("num_classes", [10, 127, 1000])
@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999, 0.9999])
def test_confident_rows_keep_their_gradient_in_bf16(
    probability: float, num_classes: int, hard: bool, device: torch.device
) -> None:
    """Within 1 % of float64, where rounding the softmax before the subtraction loses 100 %."""
    gap = torch.tensor(probability * (num_classes - 1) / (1 - probability)).log()
    strong = torch.zeros(2, num_classes)
    strong[:, 3] = gap
    weak = torch.zeros(2, num_classes)
    weak[:, 3] = gap + 3
    weak, strong = weak.bfloat16().to(device), strong.bfloat16().to(device)
    grads = []
    for dtype, impl in ((torch.bfloat16, "triton"), (torch.float64, "eager")):
        z = strong.to(dtype).clone().requires_grad_()
        out = pseudo_label_cross_entropy(weak.to(dtype), z, None, None, 0.5, hard=hard, impl=impl)
        out.loss.backward()
        assert out.mask.all()
        assert z.grad is not None
        grads.append(z.grad.double())
    kernel, exact = grads
    assert ((kernel - exact).abs() <= 0.01 * exact.abs()).all()


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_hard_target_is_the_lowest_class_of_a_tie(impl: str, device: torch.device) -> None:
    cases = ((5, (1, 3)), (300, (7, 200)), (2500, (1020, 1030)), (2500, (7, 2499)))
    for num_classes, tied in cases:
        weak = torch.zeros(1, num_classes, device=device)
        weak[0, list(tied)] = 20.0
        out = pseudo_label_cross_entropy(weak, weak, None, None, 0.4, hard=True, impl=impl)
        assert int(out.class_mass.argmax()) == tied[0]
        assert float(out.class_mass.sum()) == 1.0


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_threshold_above_one_keeps_nothing(impl: str, device: torch.device) -> None:
    weak = 30 * torch.eye(4, device=device)
    strong = torch.randn(8, 4, device=device, requires_grad=True)
    out = pseudo_label_cross_entropy(weak, strong, None, None, 1.01, impl=impl)
    out.loss.backward()
    assert out.loss == 0 and not out.mask.any()
    assert (out.class_mass == 0).all()
    assert strong.grad is not None and (strong.grad == 0).all()


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_mean_counts_masked_rows(impl: str, device: torch.device) -> None:
    """One of four rows is kept: the loss is that row's divided by 4, not by 1."""
    weak = torch.zeros(4, 3, device=device)
    weak[2, 1] = 9.0
    strong = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(device)
    mean = pseudo_label_cross_entropy(weak, strong, None, None, 0.9, impl=impl)
    rows = pseudo_label_cross_entropy(weak, strong, None, None, 0.9, reduction="none", impl=impl)
    assert mean.mask.tolist() == [False, False, True, False]
    torch.testing.assert_close(mean.loss, rows.loss[2] / 4)
    torch.testing.assert_close(mean.class_mass, weak[2].softmax(0))


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_class_mass_counts_an_image_once(impl: str, device: torch.device) -> None:
    weak = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)).to(device)
    for views in (1, 3):
        out = pseudo_label_cross_entropy(weak, weak.repeat(views, 1), None, None, 0.0, impl=impl)
        torch.testing.assert_close(out.class_mass, weak.softmax(1).sum(0))


def test_module_is_the_function(device: torch.device) -> None:
    case = Case(9, 7)
    inputs = make_inputs(case, device)
    arguments = (inputs.weak, inputs.strong, inputs.prior_weak, inputs.prior_strong)
    module = PseudoLabelCrossEntropy(inputs.threshold, hard=True, impl="triton")
    expected = pseudo_label_cross_entropy(*arguments, inputs.threshold, hard=True, impl="triton")
    for got, want in zip(module(*arguments), expected, strict=True):
        assert torch.equal(got, want)
    assert "hard=True" in repr(module)
