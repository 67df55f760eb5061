"""The DALI graph: exact weak views, strong views, normalisation, memory format."""

from __future__ import annotations

import sys

import numpy as np
import pillow_policy
import pytest
import torch
from sklearn.datasets import load_sample_image

from simpro_fast.data.augment.views import EagerViews, FusedViews, strong_table, weak_table
from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.pipeline import dali
from simpro_fast.data.sampling.draws import AugmentParams, Stream, augment_params
from simpro_fast.utils.errors import UserError

CPU = torch.device("cpu")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)


def photos(count: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    photo = load_sample_image("flower.jpg")
    corners = rng.integers(0, [photo.shape[0] - size, photo.shape[1] - size], (count, 2))
    return np.stack([photo[y : y + size, x : x + size] for y, x in corners])


def draws(count: int, size: int, shift: int, flip: bool = True) -> AugmentParams:
    return augment_params(
        1,
        Stream.AUGMENT_LABELED,
        0,
        start=0,
        count=count,
        num_views=1,
        augment=AugmentConfig(size, shift, flip),
    )


def run_graph(
    images: np.ndarray,
    one: AugmentParams,
    strong: np.ndarray,
    augment: AugmentConfig,
    device: torch.device = CPU,
    maker: EagerViews | FusedViews | None = None,
) -> torch.Tensor:
    resident = torch.from_numpy(images).to(device)
    numbers = np.arange(len(one))[:, None]
    plan = np.concatenate([numbers, one.flip[:, None], one.shift, strong], 1).astype(np.int32)
    made = maker or EagerViews(augment, threads=1, parts=2)
    pipe = dali.build_pipeline(
        lambda: made(resident, plan),
        parts=made.parts,
        normalised=made.normalised,
        augment=augment,
        device=device,
        num_threads=1,
        prefetch=2,
    )
    (output,) = pipe.run()
    return made.received(torch.from_dlpack(output.as_tensor())).flatten(0, 1)


def expected_normalised(views: np.ndarray) -> np.ndarray:
    return (views / 255.0 - np.array(MEAN)) / np.array(STD)


@pytest.mark.parametrize(("size", "shift"), [(16, 2), (28, 3), (32, 4), (32, 0), (64, 8)])
def test_weak_views_are_flip_then_reflect_crop(size: int, shift: int) -> None:
    images, one = photos(120, size), draws(120, size, shift)
    views = AugmentConfig(size, shift, True, 0, MEAN, STD)
    out = run_graph(images, one, weak_table(120), views)
    weak = np.stack(
        [
            pillow_policy.crop_flip(image, offset, flip, shift)
            for image, offset, flip in zip(images, one.shift, one.flip, strict=True)
        ]
    )
    assert out.dtype == torch.float32
    assert out.shape == (120, size, size, 3)
    # Half a grey level would be 0.008: the pixels are the same ones.
    np.testing.assert_allclose(out.numpy(), expected_normalised(weak), atol=2e-6, rtol=0)
    assert out.permute(0, 3, 1, 2).is_contiguous(memory_format=torch.channels_last)
    if shift:
        assert len(np.unique(one.shift)) == 2 * shift + 1


def test_strong_views_are_weak_view_then_policy() -> None:
    size, shift, side, count = 32, 4, 16, 300
    images, one = photos(count, size), draws(count, size, shift)
    table = strong_table(one, cutout=side, width=size, height=size)
    out = run_graph(images, one, table, AugmentConfig(size, shift, True, side, MEAN, STD))
    strong = np.stack(
        [
            pillow_policy.strong_view(
                pillow_policy.crop_flip(images[i], one.shift[i], one.flip[i], shift),
                operation=one.operation[i],
                level=one.level[i],
                apply=one.apply[i],
                negative=one.negative[i],
                cutout_centre=one.cutout_centre[i],
                cutout_side=side,
            )
            for i in range(count)
        ]
    )
    np.testing.assert_allclose(out.numpy(), expected_normalised(strong), atol=2e-6, rtol=0)


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)], ids=str)
def test_views_that_come_normalised_are_the_same_ones(device: torch.device | str) -> None:
    """From one operation, as on a GPU: bit for bit those that the pipeline normalises."""
    size, shift, count = 32, 4, 300
    images, one = photos(count, size), draws(count, size, shift)
    table = strong_table(one, cutout=16, width=size, height=size)
    augment = AugmentConfig(size, shift, True, 16, MEAN, STD)
    expected = run_graph(images, one, table, augment)
    device = torch.device(device)
    for dtype in (torch.float32, torch.bfloat16):
        fused = FusedViews(augment, dtype)
        made = run_graph(images, one, table, augment, device, fused)
        assert made.device.type == device.type
        assert torch.equal(made.cpu(), expected.to(dtype))


def test_without_dali_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(UserError, match="pip install nvidia-dali-cuda130"):
        dali.import_dali()
