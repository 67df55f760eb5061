"""A class distribution that is given in place of the estimate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpro_fast.config import Config
from simpro_fast.config.methods import METHODS
from simpro_fast.methods import build_method
from simpro_fast.methods.anchors import symmetric_kl
from simpro_fast.utils.errors import ConfigError, UserError
from tests.methods.settings import setting
from tests.training.test_method_protocol import interrupted
from tests.training.test_trainer import train

MakeConfig = Callable[..., Config]
GIVEN = (0.2, 0.3, 0.5)
KEYS: dict[str, dict[str, Any]] = {
    "simpro": {},
    "simpro_star": {"anchor_after": 1},
    "acr": {"estimate_after": 0},
    "acr_no_anchors": {"estimate_after": 0},
    "adello": {},
}


@pytest.mark.parametrize("name", KEYS)
def test_the_estimate_is_the_given_one_to_the_end(name: str) -> None:
    config = METHODS[name].keys(**KEYS[name], **{"prior": GIVEN})
    method = build_method(config, setting(prior=GIVEN))
    heads = (2,) if name.startswith("acr") else ()
    generator = torch.Generator().manual_seed(0)
    for step in range(15):
        if step % 5 == 0 and method.phase_at(step // 5) != method.phase:
            method.phase = method.phase_at(step // 5)
            method.enter_phase(method.phase, None)  # type: ignore[arg-type]
        logits = [5 * torch.randn(n, *heads, 3, generator=generator) for n in (12, 9, 18)]
        method(logits[0], torch.arange(6) % 3, logits[1], logits[2])
        method.end_step(step)
        if step % 5 == 4:
            method.end_period()
        assert method.normalised_pi_u().tolist() == pytest.approx(GIVEN, rel=1e-9)
    if name == "acr":  # by its definition, with the distances of the given distribution
        distance = symmetric_kl(torch.tensor(GIVEN, dtype=torch.float64), method.anchors)
        assert method.tau_target.item() == pytest.approx(2 * distance.softmax(0)[0].item())
    if name == "simpro":
        assert method.phi.tolist() != pytest.approx([40 / 60, 15 / 60, 5 / 60], rel=1e-3)


def test_a_second_run_takes_the_estimate_of_the_first(tiny: MakeConfig) -> None:
    first = tiny({"name": "first", "evaluate.shares_images": 50})
    rows = train(first)["shares"]["rows"]
    path = first.run_dir / "summary.json"
    second = tiny({"name": "second", "method.prior": str(path)})
    interrupted(second, 7)
    found = json.loads((second.run_dir / "summary.json").read_text())["pi_u"]
    assert found == pytest.approx([row["estimate"] for row in rows], rel=1e-6)
    # Another content of the file is another run.
    shares = {str(k): 1.0 for k in range(10)}
    path.write_text(json.dumps(shares))
    longer = tiny({"name": "second", "method.prior": str(path), "train.steps": 14})
    with pytest.raises(UserError, match="another prior"):
        train(longer)


@pytest.mark.parametrize(
    ("prior", "message"),
    [([1, 2], "2 shares for 10 classes"), ("nowhere.json", "method.prior=nowhere.json")],
)
def test_priors_that_cannot_be(tiny: MakeConfig, prior: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny({"method.prior": prior}))
    with pytest.raises(ConfigError, match="one above 0"):
        tiny({"method.prior": [0, 0]})
