"""SimPro where its users put it: inside wrapped modules, copied, with labels of any kind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from simpro_fast import FixMatch, SimPro
from tests.distributed.gloo_ranks import run_ranks


def inputs(targets: Tensor, classes: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(len(targets))
    labeled = torch.randn(len(targets), classes, generator=g)
    weak, strong = (4 * torch.randn(8, classes, generator=g) for _ in range(2))
    return labeled, targets, weak, strong


class Wrapped(nn.Module):
    """A network and its loss in one module, as loops around DistributedDataParallel have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.simpro = SimPro([5, 3, 2], strong_views=1, threshold=0.0)

    def forward(self, *batch: Tensor) -> Tensor:
        labeled, targets, weak, strong = batch
        return self.simpro(self.net(labeled), targets, self.net(weak), self.net(strong)).loss


def _under_ddp(rank: int, world_size: int) -> tuple[list[float], list[float], float]:
    torch.manual_seed(0)
    module = DistributedDataParallel(Wrapped())
    for step in range(3):
        targets = torch.full((4,), rank + (step == 2), dtype=torch.int64)
        module(*inputs(targets)).backward()
    simpro = module.module.simpro
    counts, mass = simpro.labeled_count.tolist(), float(simpro.unlabeled_mass.sum())
    simpro.update_priors()
    return counts, simpro.phi.tolist(), mass


def test_ddp_leaves_the_counts_of_each_rank_alone() -> None:
    first, second = run_ranks(_under_ddp)
    assert first[0] == [8, 4, 0] and second[0] == [0, 8, 4]
    assert first[1] == second[1]
    assert first[2] == pytest.approx(24) and second[2] == pytest.approx(24)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_type_is_a_label(dtype: torch.dtype) -> None:
    targets = torch.tensor([0, 2, 2, 1])
    usual, other = (SimPro([5, 3, 2], strong_views=1) for _ in range(2))
    expected = usual(*inputs(targets))
    assert torch.equal(other(*inputs(targets.to(dtype))).loss, expected.loss)
    assert torch.equal(other.labeled_count, usual.labeled_count)


@pytest.mark.parametrize("kind", [SimPro, FixMatch])
@pytest.mark.parametrize("wrong", [3, -1, 255])
def test_a_label_out_of_range_is_one_line_and_counts_nothing(kind: Any, wrong: int) -> None:
    method = kind([5, 3, 2], strong_views=1)
    with pytest.raises(ValueError, match=rf"0 to 2 \(K = 3 .*\) or -100 \(ignored\), got {wrong}"):
        method(*inputs(torch.tensor([0, wrong])))
    assert not method.labeled_count.any()
    # What a GPU does, where a look at the labels would wait for it.
    method.accumulate(torch.tensor([0, wrong, -100]), torch.zeros(3))
    assert method.labeled_count.tolist() == [1, 0, 0]


def test_labels_that_are_no_integers() -> None:
    with pytest.raises(ValueError, match=r"must be integers, got torch\.float32"):
        SimPro([5, 3, 2], strong_views=1)(*inputs(torch.tensor([0.0, 1.0])))


def _copied(rank: int, world_size: int) -> list[float]:
    group = dist.new_group([0, 1])
    simpro = SimPro([5, 3, 2], strong_views=1, process_group=group)
    copied = copy.deepcopy(simpro)
    copied.accumulate(torch.tensor([rank]), torch.zeros(3))
    assert not simpro.labeled_count.any() and copied.process_group is group
    copied.update_priors()
    with pytest.raises(TypeError, match="process_group= cannot be pickled"):
        pickle.dumps(simpro)
    return copied.phi.tolist()


def test_a_copy_counts_for_itself_over_the_same_ranks() -> None:
    first, second = run_ranks(_copied)
    assert first == second == pytest.approx([0.9 * 0.5 + 0.05, 0.9 * 0.3 + 0.05, 0.9 * 0.2])


def test_pickling_without_a_group() -> None:
    simpro = SimPro([5, 3, 2], strong_views=1)
    simpro(*inputs(torch.tensor([0, 1])))
    again = pickle.loads(pickle.dumps(simpro))
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in simpro.state_dict().items()
    }


def test_made_under_inference_mode() -> None:
    with torch.inference_mode():
        simpro = SimPro([5, 3, 2], strong_views=1)
    simpro.threshold = 0.6
    simpro(*inputs(torch.tensor([0, 1])))
    simpro.update_priors()
    assert simpro.phi[0] != 0.5


def test_a_threshold_that_changes_every_step_compiles_once() -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    eager, compiled = (SimPro([5, 3, 2], strong_views=1) for _ in range(2))
    compiled.compile(backend=graphs, dynamic=False, fullgraph=True)
    rates = []
    for threshold in (0.4, 0.5, 0.6, 0.7, 0.99):
        eager.threshold = compiled.threshold = threshold
        out, expected = (m(*inputs(torch.tensor([0, 1, 2, 0]))) for m in (compiled, eager))
        assert torch.equal(out.mask, expected.mask)
        rates.append(float(out.mask_rate))
    assert graphs.frame_count == 1
    assert rates[0] > rates[-1] and compiled.threshold == 0.99
    torch._dynamo.reset()
