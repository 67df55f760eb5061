import copy

import pytest
import torch
import torch.distributed as dist
from simpro_kernels import BatchNormAct
from torch import Tensor, nn

from simpro_fast.models import ModelEMA
from simpro_fast.models.batch_norm import (
    average_buffers,
    convert_sync_batch_norm,
    first_rank_buffers,
)
from tests.distributed.gloo_ranks import run_ranks

ROWS = (5, 3)  # Per rank, unequal on purpose.


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.SiLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6, momentum=0.05, affine=False),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.BatchNorm1d(5, momentum=None),
    )
    return model.double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(ROWS), 3, 6, 6, generator=generator, dtype=torch.float64)
    x[ROWS[0] :] += 60.0  # The second rank's images are brighter.
    return x, torch.randn(sum(ROWS), 5, generator=generator, dtype=torch.float64)


def _results(model: nn.Module, outputs: Tensor, x: Tensor) -> dict[str, Tensor]:
    found = {f"grad {n}": p.grad for n, p in model.named_parameters()}
    found |= {f"state {n}": t for n, t in model.state_dict().items()}
    return {**found, "outputs": outputs.detach(), "grad x": x.grad}


def _train(model: nn.Module, rows: slice) -> dict[str, Tensor]:
    for step in range(3):
        x, weight = (tensor[rows].clone() for tensor in batch(step))
        x.requires_grad_()
        outputs = model(x)
        (outputs * weight).sum().backward()
    model.eval()(x)
    return _results(model, outputs, x)


def _rank_results(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    rows = slice(0, ROWS[0]) if rank == 0 else slice(ROWS[0], sum(ROWS))
    model = convert_sync_batch_norm(network())
    ModelEMA(model, 0.9)  # Copies the model although it refers to the process group.
    synchronised = _train(model, rows)

    half = convert_sync_batch_norm(nn.BatchNorm2d(3))
    out = half(batch(0)[0][rows].bfloat16())
    assert out.dtype == torch.bfloat16 and half.running_mean.dtype == torch.float32
    synchronised["half"] = out

    single = convert_sync_batch_norm(nn.BatchNorm1d(2))
    single(torch.tensor([[1.0, 2.0]]))  # One row per rank, two in all.

    averaged = network().float()
    averaged(batch(rank)[0][rows].float())
    own = {name: buffer.clone() for name, buffer in averaged.named_buffers()}
    average_buffers(averaged)
    found = {name: buffer.clone() for name, buffer in averaged.named_buffers()}
    averaged.load_state_dict(own, strict=False)
    first_rank_buffers(averaged)
    return {
        "synchronised": synchronised,
        "own": own,
        "averaged": found,
        "first": dict(averaged.named_buffers()),
    }


def test_two_ranks():
    ranks = run_ranks(_rank_results)
    expected = _train(network(), slice(None))
    first, second = (result["synchronised"] for result in ranks)
    close = {"rtol": 1e-10, "atol": 1e-10}
    for name, tensor in expected.items():
        if name in ("outputs", "grad x"):
            found = torch.cat([first[name], second[name]])
        elif name.startswith("grad"):
            found = first[name] + second[name]
        else:
            assert torch.equal(first[name], second[name]), name
            found = first[name]
        torch.testing.assert_close(found, tensor, **close, msg=lambda m, name=name: f"{name}: {m}")
    joined = nn.BatchNorm2d(3)(batch(0)[0].bfloat16().float())
    half = torch.cat([first["half"], second["half"]]).float()
    torch.testing.assert_close(half, joined, rtol=1e-2, atol=1e-2)

    (own_0, averaged_0), (own_1, averaged_1) = ((r["own"], r["averaged"]) for r in ranks)
    for result in ranks:
        for name, buffer in result["first"].items():
            assert torch.equal(buffer, own_0[name]), name
    for name in averaged_0:
        assert torch.equal(averaged_0[name], averaged_1[name]), name
        assert averaged_0[name].dtype == own_0[name].dtype
        if own_0[name].is_floating_point():
            assert not torch.equal(own_0[name], own_1[name])
            mean = (own_0[name] + own_1[name]) / 2
            torch.testing.assert_close(averaged_0[name], mean)


@pytest.fixture
def one_rank(tmp_path):
    if dist.is_initialized():  # Another test needed the same.
        yield
        return
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_equals_plain_batch_norm(one_rank):
    plain = _train(network(), slice(None))
    synchronised = _train(convert_sync_batch_norm(network()), slice(None))
    for name, tensor in plain.items():
        torch.testing.assert_close(synchronised[name], tensor, rtol=1e-10, atol=1e-10)


def test_a_second_derivative_is_an_error_and_not_a_wrong_number(one_rank):
    norm = convert_sync_batch_norm(BatchNormAct(2, dtype=torch.float64))
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_large_offset_keeps_the_variance(one_rank):
    norm = convert_sync_batch_norm(nn.BatchNorm1d(1, momentum=1.0))
    x = torch.tensor([[10_000.0], [10_001.0], [10_002.0]])
    norm(x)
    assert norm.running_var.item() == pytest.approx(1.0, rel=1e-5)


def test_a_single_value_is_an_error(one_rank):
    with pytest.raises(ValueError, match="more than one value per channel"):
        convert_sync_batch_norm(nn.BatchNorm1d(2))(torch.zeros(1, 2))


def test_conversion_keeps_tensors_names_and_settings():
    model = network()
    model[4].eval()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    settings = [(m.momentum, m.eps, m.affine, m.training) for m in model if hasattr(m, "momentum")]
    converted = convert_sync_batch_norm(model)
    after = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    assert list(before) == list(after) and all(before[n] is after[n] for n in before)
    norms = [m for m in converted if isinstance(m, BatchNormAct)]
    assert [(m.momentum, m.eps, m.affine, m.training) for m in norms] == settings
    assert convert_sync_batch_norm(converted)[1] is norms[0]
    assert isinstance(convert_sync_batch_norm(nn.BatchNorm1d(3)), BatchNormAct)


def test_evaluation_needs_no_ranks():
    model = network().eval()
    x = batch(0)[0]
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(convert_sync_batch_norm(model)(x), expected, rtol=0, atol=0)


def test_average_buffers_without_ranks_changes_nothing():
    model = network()
    model(batch(0)[0])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    average_buffers(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
