"""`train.precision`: what goes into the network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models.build import build_model
from simpro_fast.training.engine.base import PrecisionForward, views_dtype


@pytest.mark.parametrize("network", ["small_cnn", "wrn_10_1"])
def test_views_may_come_as_autocast_would_make_them(
    tiny: Callable[..., Config], network: str
) -> None:
    config = tiny({"train.precision": "bf16", "model.name": network, "model.bn_momentum": None})
    model = build_model(config.model, 10, 16)
    ranks = Ranks(0, 0, 1, 1, torch.device("cpu"))
    forward = PrecisionForward(config, model, ranks).eval()
    views = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    assert views_dtype(config) == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(forward(views.bfloat16())[0], forward(views)[0])


def test_other_precisions_take_float32_views(tiny: Callable[..., Config]) -> None:
    for precision in ("fp32", "fp64"):
        assert views_dtype(tiny({"train.precision": precision})) == torch.float32
