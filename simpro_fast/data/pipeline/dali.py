"""The DALI graph of a training step from arrays, and the parts it shares with file_graph.py.

All randomness comes in from outside (sampling/draws.py), so a graph has no random operator and no
seed. The same functions serve CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from simpro_kernels.augment.reference import strong_policy
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from simpro_fast.data.batch import AugmentConfig
from simpro_fast.utils.errors import UserError


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


def batch_function(
    function: Callable[..., list[Tensor]], *inputs: Any, gpu: bool, layout: str
) -> Any:
    """An operator that calls `function` once a run, in the pipeline's own thread.

    It gets a list of tensors, one per sample, for each input, and gives a list of tensors, all on
    the pipeline's device.
    """
    fn, _, _ = import_dali()
    if gpu:
        # Runs on a stream of its own, which this operator joins with the pipeline's.
        import nvidia.dali.plugin.pytorch as dali_torch

        return dali_torch.fn.torch_python_function(
            *(one.gpu() for one in inputs),
            function=function,
            device="gpu",
            batch_processing=True,
            output_layouts=layout,
        )

    # The same from its parts: torch_python_function wants a CUDA driver on the CPU too.
    def on_cpu(*lists: list[Any]) -> list[Any]:
        # A second pool of torch threads would only spin against the one that trains. The setting
        # is the calling thread's, here one of the pipeline's own.
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        outputs = function(*([from_dlpack(sample) for sample in one] for one in lists))
        return [to_dlpack(output) for output in outputs]

    return fn.dl_tensor_python_function(
        *inputs, function=on_cpu, batch_processing=True, output_layouts=layout
    )


def strong_view(views: Any, next_table: Callable[[], np.ndarray], *, gpu: bool) -> Any:
    """The strong policy on a batch of views.

    Args:
        next_table: gives the table of the next run (see `views.strong_table`), which stays on the
            host: the host must know it, and reading it back from a GPU would wait.
    """

    def policy(samples: list[Tensor]) -> list[Tensor]:
        return list(strong_policy(torch.stack(samples), next_table()))

    return batch_function(policy, views, gpu=gpu, layout="HWC")


def normalise(
    views: Any, *, mean: Sequence[float], std: Sequence[float], layout: str = "HWC"
) -> Any:
    """uint8 to float32 of the same layout, (x / 255 - mean) / std."""
    fn, types, _ = import_dali()
    return fn.crop_mirror_normalize(
        views,
        mean=[255.0 * value for value in mean],
        std=[255.0 * value for value in std],
        dtype=types.FLOAT,
        output_layout=layout,
    )


def built(
    graph: Callable[[], Any], samples: int, device: torch.device, num_threads: int, prefetch: int
) -> Any:
    """A built pipeline of a graph, for so many samples a run."""
    _, _, pipeline_def = import_dali()
    pipe = pipeline_def(graph)(
        batch_size=samples,
        num_threads=num_threads,
        device_id=(device.index or 0) if device.type == "cuda" else None,
        # Under the other executors torch tensors that share the output's memory are overwritten a
        # few runs later, and a file that cannot be decoded costs other steps than its own.
        exec_dynamic=True,
        prefetch_queue_depth=prefetch,
    )
    pipe.build()
    return pipe


def build_pipeline(
    make_views: Callable[[], list[Tensor]],
    *,
    parts: int,
    normalised: bool,
    augment: AugmentConfig,
    device: torch.device,
    num_threads: int,
    prefetch: int,
) -> Any:
    """A built pipeline of one output of `parts` samples: [n, size, size, 3], normalised.

    A sample is many views (a "sequence" for DALI), since the cost of an operator is that of its
    samples where images are small; its threads share the samples.

    Args:
        make_views: gives the next views, `parts` tensors [n, size, size, 3] on `device`. Called in
            the pipeline's thread, once a run and in order, up to `prefetch` runs ahead.
        normalised: whether they come so, and leave as they come; else they are uint8 and leave as
            float32.
    """
    gpu = device.type == "cuda"

    def graph() -> Any:
        batch = batch_function(make_views, gpu=gpu, layout="FHWC")
        if normalised:
            return batch
        return normalise(batch, mean=augment.mean, std=augment.std, layout="FHWC")

    return built(graph, parts, device, num_threads, prefetch)
