"""Two runs are bit-equal; another number of multiprocessors changes rounding only."""

import pytest
import torch
from oracles import Case, make_inputs, run_pseudo
from simpro_kernels import tl_utils


@pytest.mark.parametrize(
    "case", [Case(100, 10), Case(20, 127, dtype="bf16"), Case(6, 4100)], ids=str
)
def test_two_runs_are_bit_equal(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    first, first_grad = run_pseudo(case, inputs, "triton")
    second, second_grad = run_pseudo(case, inputs, "triton")
    for a, b in zip([*first, first_grad], [*second, second_grad], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", [Case(300, 10), Case(12, 4100)], ids=str)
def test_number_of_programs_changes_rounding_only(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(case, device)
    results = []
    for multiprocessors in (1, 2, 7):
        monkeypatch.setattr(tl_utils, "_multiprocessors", lambda _, n=multiprocessors: n)
        results.append(run_pseudo(case, inputs, "triton"))
    (reference, reference_grad), *others = results
    for out, grad in others:
        assert torch.equal(grad, reference_grad) and torch.equal(out.mask, reference.mask)
        torch.testing.assert_close(out.loss, reference.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(out.class_mass, reference.class_mass, rtol=1e-6, atol=1e-7)


def test_second_reduction_covers_more_programs_than_one_block(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(700, 45, generator=generator).to(device)
    loss = torch.rand(700, generator=generator).to(device)
    total_mass, total_loss = tl_utils.reduce_partials(mass, loss)
    torch.testing.assert_close(total_mass.double(), mass.double().sum(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(total_loss.double(), loss.double().sum(), rtol=1e-6, atol=0)


def test_one_code_path_chosen_by_the_classes_alone() -> None:
    blocks = {k: tl_utils.tile_for(k).block for k in (1, 2, 10, 127, 1000, 1025, 2048, 2049, 21841)}
    assert blocks == {
        1: 1, 2: 2, 10: 16, 127: 128, 1000: 1024, 1025: 2048, 2048: 2048, 2049: 4096, 21841: 4096
    }  # fmt: skip
    assert tl_utils.MAX_ONE_BLOCK == 2048
    # An empty batch still writes its (empty) sums.
    assert tl_utils.tile_for(10).programs(0, torch.device("cpu")) == 1
