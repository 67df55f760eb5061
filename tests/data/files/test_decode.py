"""Looking at a picture changes nothing for others in the process, and nothing of theirs counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simpro_fast.data.files.decode import read_rgb
from tests.data.image_folders import picture


def test_a_host_program_keeps_its_limit_and_its_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.png"
    picture(1, 24, 24).save(file)
    assert read_rgb(file).size == (24, 24)
    assert Image.MAX_IMAGE_PIXELS == 2**30 // 4 // 3, "Pillow's own"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(file).close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp"])
def test_neither_limit_nor_warnings_of_a_host_program_refuse_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    image = picture(1)
    options: dict[str, bytes] = {}
    if name == "a.png":  # Pillow warns of it where it is converted
        image, options = image.quantize(8), {"transparency": bytes(range(8))}
    image.save(tmp_path / name, **options)
    expected = np.asarray(Image.open(tmp_path / name).convert("RGBA"))[..., :3]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    np.testing.assert_array_equal(np.asarray(read_rgb(tmp_path / name)), expected)
