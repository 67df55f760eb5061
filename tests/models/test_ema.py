import pytest
import torch
from torch import nn

from simpro_fast.config.schema import ModelConfig
from simpro_fast.models import ModelEMA, build_model


def network() -> nn.Module:
    return build_model(ModelConfig(name="small_cnn"), 4, 8)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_average_follows_whatever_the_students_precision(dtype):
    model = network().to(dtype)
    fill(model, 1.0)
    ema = ModelEMA(model, decay=0.999)
    fill(model, 1.05)
    target = next(model.parameters())[0].flatten()[0].item()  # 1.05 rounded to the dtype
    for step in range(1000):
        ema.update(step)
    expected = target + (1.0 - target) * 0.999**1000
    for parameter in ema.module.parameters():
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(
            parameter, torch.full_like(parameter, expected), atol=1e-4, rtol=0
        )
    if dtype == torch.float32:
        assert expected == pytest.approx(1.03162, abs=1e-4)


def test_buffers_are_copied_not_averaged():
    model = network()
    ema = ModelEMA(model, decay=0.999)
    for step in range(3):
        model(torch.randn(16, 3, 8, 8) * 3 + 2)
        ema.update(step)
        for (name, mine), theirs in zip(ema.module.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(mine, theirs), name
    assert ema.module.features[1].num_batches_tracked.item() == 3
    assert ema.module.features[1].num_batches_tracked.dtype == torch.int64


def test_update_is_the_written_formula_per_parameter():
    model = network().double()
    start = [p.detach().clone() for p in model.parameters()]
    ema = ModelEMA(model, decay=0.9, warmup=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    ema.update(2)
    decay = 3 / 12
    for average, old, new in zip(ema.module.parameters(), start, model.parameters(), strict=True):
        assert average.dtype == torch.float64
        torch.testing.assert_close(average, decay * old + (1 - decay) * new, rtol=1e-14, atol=1e-14)


def test_warmup_decays():
    ema = ModelEMA(network(), decay=0.99, warmup=True)
    assert [ema.decay_at(s) for s in (0, 8, 10**6)] == [0.1, 0.5, 0.99]
    assert ModelEMA(network(), decay=0.99).decay_at(0) == 0.99


def test_average_is_in_eval_mode_and_needs_no_gradient():
    model = network()
    ema = ModelEMA(model, decay=0.9)
    assert model.training and not ema.module.training
    assert not any(p.requires_grad for p in ema.module.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_state_dict_round_trip():
    model = network()
    ema = ModelEMA(model, decay=0.9)
    fill(model, 0.3)
    ema.update(0)
    saved = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    other = ModelEMA(network(), decay=0.9)
    other.load_state_dict(saved)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, saved[name])
    with pytest.raises(RuntimeError, match="head"):
        other.load_state_dict({k: v for k, v in saved.items() if "head" not in k})


def test_channels_last_student_moved_after_construction():
    model = network()
    ema = ModelEMA(model, decay=0.5)
    start = [p.detach().clone() for p in model.parameters()]
    model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    ema.update(0)
    for average, old in zip(ema.module.parameters(), start, strict=True):
        torch.testing.assert_close(average, 2 * old)
    strides = [p.stride() for p in model.parameters()]
    assert [p.stride() for p in ema.module.parameters()] == strides


def test_decay_of_one_is_an_error():
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        ModelEMA(network(), decay=1.0)
