"""What the README shows works: its loop runs, its commands parse, its files exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from simpro_fast.config import load_config
from tests.conftest import ROOT
from tests.docs.pages import run_commands
from tests.docs.test_pages import write_photos

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_loop_trains_and_moves_the_prior() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 8, generator=generator)

    def points(labels: torch.Tensor, noise: float = 0.5) -> torch.Tensor:
        return centres[labels] + noise * torch.randn(len(labels), 8, generator=generator)

    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        for _ in range(1000):
            targets = torch.tensor([0, 0, 0, 1, 1, 2])
            hidden = torch.multinomial(
                torch.tensor([0.1, 0.2, 0.7]), 24, replacement=True, generator=generator
            )
            yield points(targets), targets, points(hidden), points(hidden, noise=1.0)

    model = torch.nn.Linear(8, 3)
    names: dict[str, Any] = {
        "labeled_counts": [3, 2, 1],
        "batches": batches(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(code, names)
    pi_u = names["simpro"].normalised_pi_u()
    # Two updates with momentum 0.9 move a fifth of the way from uniform to [0.1, 0.2, 0.7].
    expected = 0.81 / 3 + 0.19 * torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    assert torch.allclose(pi_u, expected, atol=0.01)


WRITTEN = set(re.findall(r"--init-config (\S+)", README))


@pytest.mark.parametrize("config", sorted({*re.findall(r"--config (\S+)", README)} - WRITTEN))
def test_configs_exist(config: str) -> None:
    load_config(ROOT / config if config.endswith(".yaml") else config)


@pytest.mark.parametrize(
    "asked",
    ["", pytest.param(" --on-bad-image skip", marks=pytest.mark.slow)],
    ids=["as shown", "skip"],
)
def test_own_images_as_shown(asked: str, tmp_path: Path) -> None:
    """The block word by word; a damaged file that `prepare` was told to leave out stays so."""
    (block,) = re.findall(r"^```\n(simpro-fast prepare .*?)^```", README, re.DOTALL | re.MULTILINE)
    write_photos(tmp_path / "photos")
    if asked:
        (tmp_path / "photos/unlabeled/cut.jpg").write_bytes(b"\xff\xd8cut")
        (tmp_path / "photos/val/three/cut.jpg").write_bytes(b"\xff\xd8cut")
        first, rest = block.split("\n", 1)
        block = f"{first}{asked}\n{rest}"
    small = ["model.name=small_cnn", "data.image_size=16", "data.mu=2", "distributed.engine=plain"]
    small += ["train.steps=6", "train.period=3", "evaluate.shares_images=0"]
    said = run_commands(block, tmp_path, training=small)
    assert len(said) == 7
    labels = (tmp_path / "labels.csv").read_text().splitlines()
    assert len(labels) == 1 + 60 + bool(asked)
    assert sum(",ok," not in line for line in labels[1:]) == bool(asked)
    assert (tmp_path / "photos.onnx").is_file()
    if asked:
        first_photo = sorted((tmp_path / "photos/unlabeled").glob("photo*"))[0]
        (tmp_path / "queue.csv").write_text(f"path,label\n{first_photo},three\n")
        more = "simpro-fast prepare --add-labels queue.csv --output prepared"
        assert "1 added" in run_commands(more, tmp_path)[more]
