"""The strong policy equals Pillow, operation by operation, and has the published strength."""

from __future__ import annotations

from functools import cache

import numpy as np
import pillow_policy
import pytest
import torch
from PIL import Image
from simpro_kernels.augment.operations import CUTOUT_COLOUR, Operation
from simpro_kernels.augment.reference import make_views, strong_policy
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simpro_fast.data.augment.views import cutout_boxes, strong_table, view_plan, weak_table
from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.sampling.draws import AugmentParams, Stream, augment_params

LEVELS = range(1, 10)


@cache
def images(size: int, count: int) -> np.ndarray:
    """Real images uint8 [count + 3, size, size, 3]: photographs, a digit, and two hard cases."""
    rng = np.random.default_rng(size)
    photos = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    crops = []
    for i in range(count):
        photo = photos[i % 2]
        y, x = (int(rng.integers(photo.shape[axis] - size)) for axis in (0, 1))
        crops.append(photo[y : y + size, x : x + size])
    digit = Image.fromarray((load_digits().images[7] * 15.9).astype(np.uint8)).convert("RGB")
    crops.append(np.asarray(digit.resize((size, size), Image.Resampling.NEAREST)))
    crops.append(np.full((size, size, 3), 77, np.uint8))
    two_valued = np.where(np.arange(size)[:, None, None] < 3, [10, 20, 255], [10, 21, 0])
    crops.append(two_valued.repeat(size, 1).astype(np.uint8))
    return np.stack(crops)


def run_operation(batch: np.ndarray, operation: int, level: int, negative: bool) -> np.ndarray:
    table = weak_table(len(batch))
    table[:, 3:6] = operation, level, negative
    return strong_policy(torch.from_numpy(batch), table).numpy()


@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.name.lower())
@pytest.mark.parametrize(("size", "count"), [(28, 6), (33, 2), (224, 2)])
def test_every_operation_level_and_sign_equals_pillow(
    operation: Operation, size: int, count: int
) -> None:
    batch = images(size, count)
    for level in LEVELS if size < 200 else (1, 4, 9):
        for negative in (False, True):
            ours = run_operation(batch, operation, level, negative)
            expected = np.stack(
                [
                    np.asarray(
                        pillow_policy.apply_operation(
                            Image.fromarray(image),
                            pillow_policy.OPERATIONS[operation],
                            level,
                            negative,
                        )
                    )
                    for image in batch
                ]
            )
            assert np.array_equal(ours, expected), f"level {level}, negative {negative}"


def sample_draws(count: int, size: int, step: int = 0) -> AugmentParams:
    return augment_params(
        11,
        Stream.AUGMENT_UNLABELED,
        step,
        start=0,
        count=count,
        num_views=1,
        augment=AugmentConfig(size, size // 8, True),
    )


@pytest.mark.parametrize(("size", "side"), [(16, 6), (28, 14), (32, 16), (64, 16), (32, 0)])
def test_the_whole_policy_equals_pillow(size: int, side: int) -> None:
    pool = images(size, 12)
    draws = sample_draws(400, size)
    batch = pool[np.arange(400) % len(pool)]
    table = strong_table(draws, cutout=side, width=size, height=size)
    before = torch.from_numpy(batch.copy())
    ours = strong_policy(before, table).numpy()
    assert np.array_equal(before.numpy(), batch), "the input is not changed"
    for i in range(400):
        expected = pillow_policy.strong_view(
            batch[i],
            operation=draws.operation[i],
            level=draws.level[i],
            apply=draws.apply[i],
            negative=draws.negative[i],
            cutout_centre=draws.cutout_centre[i],
            cutout_side=side,
        )
        assert np.array_equal(ours[i], expected), f"view {i}: {table[i]}"


def test_a_view_does_not_depend_on_the_others_in_its_batch() -> None:
    draws = sample_draws(200, 32)
    table = strong_table(draws, cutout=16, width=32, height=32)
    batch = torch.from_numpy(images(32, 12)[np.arange(200) % 15])
    whole = strong_policy(batch, table)
    for part in (slice(0, 1), slice(37, 90)):
        assert torch.equal(strong_policy(batch[part], table[part]), whole[part])


def test_cutout_border_rule() -> None:
    """16 px at 32: 17 px inside, 16 against the near border, down to 9 at the far one."""
    centre = np.array([[16.0, 16.0], [0.0, 31.9], [8.5, 8.0]])
    boxes = cutout_boxes(centre, 16, 32, 32)
    assert boxes.tolist() == [[8, 8, 24, 24], [23, 0, 31, 16], [0, 0, 16, 16]]
    table = weak_table(3)
    table[:, 6:] = boxes
    out = strong_policy(torch.zeros(3, 32, 32, 3, dtype=torch.uint8), table)
    filled = (out == CUTOUT_COLOUR).all(3)
    assert filled.sum(dim=(1, 2)).tolist() == [17 * 17, 9 * 17, 17 * 17]
    widths = cutout_boxes(np.stack([np.linspace(0, 31.99, 999)] * 2, 1), 16, 32, 32)
    assert set((widths[:, 2] - widths[:, 0] + 1).tolist()) == set(range(9, 18))


def test_case_11_strength_of_the_policy() -> None:
    """Strong draws of a colour gradient are never constant; a shift has the published direction."""
    ramp = np.arange(32, dtype=np.uint8)
    gradient = np.stack(
        np.broadcast_arrays(ramp * 8, ramp[:, None] * 8, (ramp + ramp[:, None]) * 4), axis=2
    ).astype(np.uint8)
    draws = sample_draws(8000, 32)
    batch = torch.from_numpy(np.broadcast_to(gradient, (8000, 32, 32, 3)).copy())
    views = strong_policy(batch, strong_table(draws, cutout=16, width=32, height=32))
    views = views.view(8000, -1)
    assert (views.amax(1) != views.amin(1)).all()
    ours = run_operation(gradient[None], Operation.TRANSLATE_X, 9, False)[0]
    assert np.array_equal(ours[:, : 32 - 8], gradient[:, 8:])
    assert not ours[:, 32 - 8 :].any()


@pytest.mark.gpu
def test_the_gpu_gives_the_same_bits() -> None:
    draws = sample_draws(600, 32)
    table = strong_table(draws, cutout=16, width=32, height=32)
    batch = torch.from_numpy(images(32, 12)[np.arange(600) % 15])
    assert torch.equal(strong_policy(batch.cuda(), table).cpu(), strong_policy(batch, table))


class Recorder(TorchDispatchMode):
    """Names of the operations that run, and how many of them cross from the host to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copies = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.names.append(function.overloadpacket.__name__)
        tensors = [x for x in tree_leaves((arguments, options, result)) if isinstance(x, Tensor)]
        self.copies += len({tensor.device for tensor in tensors}) > 1
        return result


def test_views_need_no_synchronisation() -> None:
    """On a device without data, where whatever asks for a value fails."""
    draws, views = sample_draws(300, 32), AugmentConfig(32, 4, True, 16, (0.5,) * 3, (0.2,) * 3)
    table = view_plan(draws, np.arange(100), views)
    images = torch.empty(100, 32, 32, 3, dtype=torch.uint8, device="meta")
    make_views(images, table, max_shift=4)  # fills the tables that stay on the device
    with Recorder() as recorder:
        made = make_views(images, table, max_shift=4)
    assert made.shape == (300, 32, 32, 3)
    assert made.device.type == "meta"
    assert recorder.copies == 2, "one for the crops, one for the policy"
    waiting = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal"}
    assert not waiting & set(recorder.names)
    assert "index_select" in recorder.names
