"""Any shape and any strides give what contiguous copies give.

Bit for bit where the alignment is the same. Another alignment means loads of another width, so a
lane has other elements and sums round differently in their last bits.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from simpro_kernels.launch import round_up
from simpro_kernels.tl_utils import alignment, rows_of
from torch import Tensor

LAYOUTS = ("contiguous", "row slice", "column slice", "every other row", "transposed", "spare")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers in memory of another shape, NaN around them."""
    rows, cols = values.shape
    shapes = {
        "contiguous": ((rows, cols), (slice(None), slice(None))),
        "row slice": ((rows + 3, cols), (slice(3, None), slice(None))),
        "column slice": ((rows, cols + 5), (slice(None), slice(2, cols + 2))),
        "every other row": ((2 * rows, cols), (slice(None, None, 2), slice(None))),
        "transposed": ((cols, rows), None),
        "spare": ((rows, round_up(cols, 8)), (slice(None), slice(cols))),
    }
    shape, index = shapes[layout]
    memory = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
    view = memory.T if index is None else memory[index]
    view.copy_(values)
    return view


def assert_same(
    plain: list[Tensor], strided: list[Tensor], again: list[Tensor], bits: bool
) -> None:
    """Two runs of one layout are bit-equal; another layout is, if its alignment is the same."""
    for one, other, twice in zip(plain, strided, again, strict=True):
        assert torch.equal(other, twice)
        if bits or not one.is_floating_point():
            assert torch.equal(one, other)
        else:
            # Float32 sums in another order, and one step of the gradient's dtype where they round.
            rtol = max(2e-6, torch.finfo(one.dtype).eps)
            torch.testing.assert_close(other, one, rtol=rtol, atol=1e-7)


@settings(
    max_examples=12 if torch.cuda.is_available() else 60,  # on a device each compiles kernels
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    num_images=st.integers(0, 9),
    num_classes=st.integers(1, 40),
    num_views=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    hard=st.booleans(),
)
def test_strides_do_not_matter(
    num_images: int,
    num_classes: int,
    num_views: int,
    dtype: torch.dtype,
    layouts: tuple[str, str],
    hard: bool,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(num_images * 41 + num_classes)
    weak = (3 * torch.randn(num_images, num_classes, generator=generator)).to(device, dtype)
    strong = torch.randn(num_views * num_images, num_classes, generator=generator)
    strong = strong.to(device, dtype)
    laid = laid_out(weak, layouts[0]), laid_out(strong, layouts[1])
    results = []
    for w, s in ((weak, strong), laid, laid):
        z = s.detach().requires_grad_()
        out = pseudo_label_cross_entropy(w, z, None, None, 0.5, hard=hard, impl="triton")
        out.loss.backward()
        results.append([*out, z.grad])
    same = alignment(weak, strong) == alignment(*map(rows_of, laid), spare=True)
    assert_same(*results, bits=same)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_classes", [1, 10, 127, 1001, 2051])
def test_spare_elements_after_each_row_make_wide_accesses(
    num_classes: int, dtype: torch.dtype, hard: bool, device: torch.device
) -> None:
    """All three kernels; what stands in the spare ones (here NaN) is in no result."""
    generator = torch.Generator().manual_seed(num_classes)

    def logits(rows: int) -> Tensor:
        values = (3 * torch.randn(rows, num_classes, generator=generator)).to(device, dtype)
        return laid_out(values, "spare")

    weak, strong = logits(6), logits(12)
    priors = [torch.randn(num_classes, generator=generator).to(device) for _ in range(2)]
    assert alignment(weak, strong, *priors, spare=True) == 8
    results = []
    for impl in ("triton", "eager"):
        z = strong.detach().requires_grad_()
        out = pseudo_label_cross_entropy(weak, z, *priors, 0.3, hard=hard, impl=impl)
        (3 * out.loss).backward()
        results.append((*out, z.grad))
    for ours, twin in zip(*results, strict=True):
        rtol = 2**-6 if ours.dtype == torch.bfloat16 else 1e-5  # rounded once and twice
        torch.testing.assert_close(ours, twin, rtol=rtol, atol=1e-6)


@pytest.mark.usefixtures("nan_in_empty_memory")
@pytest.mark.parametrize("num_classes", [1, 3, 4, 7, 127])
@pytest.mark.parametrize("layout", ["contiguous", "spare"])
def test_stored_gradient_has_no_element_that_nothing_wrote(
    layout: str, num_classes: int, device: torch.device
) -> None:
    columns = round_up(num_classes, 8)
    weak = laid_out(torch.zeros(3, num_classes, device=device), layout)
    strong = laid_out(torch.zeros(3, num_classes, device=device), "spare")
    bound = torch.zeros((), device=device)
    operands = (weak, strong, None, None, bound, False, True, True, columns)
    gradient = torch.ops.simpro_kernels.pseudo_label_cross_entropy(*operands)[4]
    assert gradient.shape == (3, columns) and gradient.isfinite().all()


def test_spare_elements_are_only_those_of_the_row_and_of_its_storage() -> None:
    memory = torch.zeros(4, 128)
    assert alignment(memory[:, :127], spare=True) == 8
    assert alignment(memory[:, :127]) == 1
    assert alignment(torch.zeros(4, 127), spare=True) == 1  # the next row begins there
    assert alignment(memory[:1, :127].expand(4, 127), spare=True) == 1  # all rows are one
    ends = torch.zeros(4 * 128 - 1).as_strided((4, 127), (128, 1))
    assert alignment(ends, spare=True) == 1  # the last row has none


def test_expanded_rows_are_not_copied(device: torch.device) -> None:
    row = torch.randn(1, 6, device=device)
    weak = row.expand(4, 6)
    assert rows_of(weak).stride() == (0, 1)
    one = pseudo_label_cross_entropy(row, row, None, None, 0.0, impl="triton")
    four = pseudo_label_cross_entropy(weak, weak, None, None, 0.0, impl="triton")
    torch.testing.assert_close(four.loss, one.loss)
    torch.testing.assert_close(four.class_mass, 4 * one.class_mass)


def test_views_of_one_batch_get_their_own_gradient(device: torch.device) -> None:
    """The usual call: labeled, weak and strong are slices of one tensor of logits."""
    grads = []
    for impl in ("triton", "eager"):
        logits = torch.randn(16, 10, generator=torch.Generator().manual_seed(0)).to(device)
        logits.requires_grad_()
        labeled, weak, strong = logits.split((4, 4, 8))
        targets = torch.tensor([1, 2], device=device)
        loss = pseudo_label_cross_entropy(weak, strong, None, None, 0.1, impl=impl).loss
        (loss + adjusted_cross_entropy(labeled, targets, None, impl=impl)).backward()
        grads.append(logits.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("dtype", "num_classes", "skip", "expected"),
    [
        (torch.bfloat16, 1000, 0, 8),
        (torch.bfloat16, 1000, 1, 8),
        (torch.bfloat16, 10, 0, 2),
        (torch.bfloat16, 10, 1, 2),
        (torch.float32, 100, 3, 4),
        (torch.float32, 127, 0, 1),
    ],
)
def test_alignment_depends_on_the_classes_and_not_on_the_batch(
    dtype: torch.dtype, num_classes: int, skip: int, expected: int
) -> None:
    for rows in (5, 64):
        logits = torch.zeros(rows, num_classes, dtype=dtype)[skip:]
        assert alignment(logits) == expected


def test_alignment_sees_a_column_offset() -> None:
    assert alignment(torch.zeros(4, 1024)[:, 1:1001]) == 1
    assert alignment(torch.zeros(4, 1024)[:, 4:1004]) == 4


def test_alignment_sees_a_prior_that_is_a_slice() -> None:
    """The kernels load the prior as wide as the logits."""
    table = torch.zeros(3, 1000)
    assert alignment(torch.zeros(4, 1000), table[1]) == 8
    assert alignment(torch.zeros(4, 1000), torch.zeros(1008)[2:1002]) == 2
    assert alignment(torch.zeros(4, 1000), None) == 8
