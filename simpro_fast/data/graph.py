"""The DALI graph of a training step: deterministic functions of per-sample inputs.

A sample is one view. All randomness comes in from outside (draws.py), so the graph has no
random operator, no seed and no state. The same functions serve CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simpro_fast.data.loader import Views
from simpro_fast.data.policy import strong_policy
from simpro_fast.errors import UserError

CHANNELS = 3
INPUTS = ("images", "crop_x", "crop_y", "mirror", "table")
"""What the source gives for n views: uint8 [n, H+2p, W+2p, 3], float32 [n], float32 [n],
int32 [n], int32 [n, 10]; see `crop_inputs` and `policy.strong_table`."""


def import_dali() -> tuple[ModuleType, ModuleType, Callable[..., Any]]:
    """(nvidia.dali.fn, nvidia.dali.types, pipeline_def), or a `UserError` with the cure."""
    try:
        import nvidia.dali.fn as fn
        import nvidia.dali.types as types
        from nvidia.dali import pipeline_def
    except ImportError as error:
        raise UserError(
            f"NVIDIA DALI cannot be imported ({error}); install it with: "
            "pip install nvidia-dali-cuda130"
        ) from error
    return fn, types, pipeline_def


def crop_inputs(
    shift: np.ndarray, flip: np.ndarray, max_shift: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`crop_x`, `crop_y` (relative to the free space) and `mirror` for the weak view.

    The view is flip first, then crop at `shift` (int64 [n, 2], y and x in 0..2*max_shift), while
    the operator crops first: where flipped, the offset x becomes 2*max_shift - x.
    """
    y, x = shift[:, 0], shift[:, 1]
    free = max(1, 2 * max_shift)
    x = np.where(flip, 2 * max_shift - x, x)
    return (
        (x / free).astype(np.float32),
        (y / free).astype(np.float32),
        flip.astype(np.int32),
    )


def weak_view(images: Any, crop_x: Any, crop_y: Any, mirror: Any, *, size: int) -> Any:
    """Flip and crop padded images to uint8 [size, size, 3]."""
    fn, types, _ = import_dali()
    return fn.crop_mirror_normalize(
        images,
        crop=(size, size),
        crop_pos_x=crop_x,
        crop_pos_y=crop_y,
        mirror=mirror,
        mean=[0.0] * CHANNELS,
        std=[1.0] * CHANNELS,
        dtype=types.UINT8,
        output_layout="HWC",
    )


def strong_view(views: Any, table: Any, *, gpu: bool) -> Any:
    """The strong policy on a whole batch of views at once; rows of `table` say which do what."""
    fn, _, _ = import_dali()
    if gpu:
        import nvidia.dali.plugin.pytorch as dali_torch

        return dali_torch.fn.torch_python_function(
            views,
            table.gpu(),
            function=_policy_on_gpu,
            device="gpu",
            batch_processing=True,
            output_layouts="HWC",
        )
    return fn.python_function(
        views, table, function=_policy_on_cpu, batch_processing=True, output_layouts="HWC"
    )


def _policy_on_cpu(views: Sequence[np.ndarray], table: Sequence[np.ndarray]) -> list[np.ndarray]:
    # A second pool of torch threads would only spin against the one that trains. The setting is
    # the calling thread's, here one of the pipeline's own.
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    return list(strong_policy(torch.from_numpy(np.stack(views)), np.stack(table)).numpy())


def _policy_on_gpu(views: Sequence[Tensor], table: Sequence[Tensor]) -> list[Tensor]:
    # The copy waits for the pipeline's stream in the pipeline's own thread, not for training.
    return list(strong_policy(torch.stack(list(views)), torch.stack(list(table)).cpu().numpy()))


def normalise(views: Any, *, mean: Sequence[float], std: Sequence[float]) -> Any:
    """uint8 HWC to float32 HWC, (x / 255 - mean) / std; torch sees it as channels_last."""
    fn, types, _ = import_dali()
    return fn.crop_mirror_normalize(
        views,
        mean=[255.0 * value for value in mean],
        std=[255.0 * value for value in std],
        dtype=types.FLOAT,
        output_layout="HWC",
    )


def view_graph(
    images: Any, crop_x: Any, crop_y: Any, mirror: Any, table: Any, *, views: Views, gpu: bool
) -> Any:
    """All views of a step, weak and strong: float32 [size, size, 3] for each sample."""
    weak = weak_view(images, crop_x, crop_y, mirror, size=views.image_size)
    return normalise(strong_view(weak, table, gpu=gpu), mean=views.mean, std=views.std)


def build_pipeline(
    image_source: Callable[[], Any],
    parameter_source: Callable[[], tuple[np.ndarray, ...]],
    *,
    rows: int,
    views: Views,
    device: torch.device,
    num_threads: int,
    prefetch: int,
) -> Any:
    """A built pipeline of one output, the views of a step.

    Args:
        image_source: gives the padded images of the next step, on `device`. On the host the
            pipeline holds the array and reads it in place, so it must never be written to again;
            on a GPU it takes a copy, in the order of the current stream.
        parameter_source: gives the other `INPUTS` of the same step, on the host.

    The dynamic executor is pinned: under the other ones torch tensors that share the output's
    memory are overwritten a few runs later.
    """
    fn, _, pipeline_def = import_dali()
    gpu = device.type == "cuda"

    @pipeline_def
    def pipeline() -> Any:
        images = fn.external_source(
            source=image_source,
            batch=True,
            layout="HWC",
            device="gpu" if gpu else "cpu",
            no_copy=not gpu,
        )
        parameters = fn.external_source(
            source=parameter_source, num_outputs=len(INPUTS) - 1, batch=True
        )
        return view_graph(images, *parameters, views=views, gpu=gpu)

    pipe = pipeline(
        batch_size=rows,
        num_threads=num_threads,
        device_id=(device.index or 0) if gpu else None,
        exec_dynamic=True,
        prefetch_queue_depth=prefetch,
    )
    pipe.build()
    return pipe
