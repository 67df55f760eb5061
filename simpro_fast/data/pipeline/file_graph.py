"""The DALI graph of a training step from image files: each is read and decoded once.

A data set of plain files names them to the graph, which reads them. Where some lie in tar shards,
the host reads them all by offset (`encoded_array`) and the graph gets their bytes; what comes
after is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from simpro_fast.data.augment.crops import Square
from simpro_fast.data.batch import CPU, AugmentConfig
from simpro_fast.data.files.decode import ImageSource, encoded_bytes
from simpro_fast.data.pipeline.dali import built, import_dali, normalise, strong_view

VIEW_INPUTS = ("start", "end", "extent", "anchor", "mirror", "table")
"""Inputs for each view of n images, (y, x) each: float32 [n, 2] and [n, 2], corners of the box cut
to the picture, pixels; float32 [n, 2], the sides that it is scaled to; int32 [n, 2], the corner of
the square seen from that of the scaled box, at most 0; int32 [n]; int32 [n, 10], see
`views.strong_table`, which the weak view does without."""


def path_array(path: str) -> np.ndarray:
    """A path as the reader wants it: uint8 [length]."""
    return np.frombuffer(path.encode("utf-8", "surrogateescape"), np.uint8)


def encoded_array(image: ImageSource) -> np.ndarray:
    """The encoded bytes: uint8 [length]; one zero where they cannot be read.

    No decoder takes a zero, so the file fails the batch that it belongs to, as a file does that
    the graph cannot read; an error from here would fail a batch before that one.
    """
    data: bytes | memoryview
    try:
        data = encoded_bytes(image)
    except OSError:
        data = b""
    return np.frombuffer(data or b"\0", np.uint8)


def decode(
    images: Any, height: Any, width: Any, *, read: bool, gpu: bool, hw_decoder_load: float = 0.65
) -> Any:
    """uint8 [H, W, 3] of each file, upright.

    The header is compared with the list before anything is decoded: a crop that was drawn for
    another size could begin outside the picture, which the resize does not survive, and neither
    does the decoder survive what is no image at all. Such a file fails its batch.

    Args:
        images: paths to read, or encoded bytes.
        height, width: int64 [1] each, pixels of the upright picture as listed.
    """
    fn, types, _ = import_dali()
    encoded = fn.io.file.read(images) if read else images
    shape = fn.peek_image_shape(encoded)
    as_listed = (shape[0:1] == height) * (shape[1:2] == width)
    # From byte 0 on, or from -1, which no slice can.
    encoded = fn.slice(encoded, start=as_listed - 1, axes=[0], out_of_bounds_policy="error")
    if not gpu:
        return fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    return fn.decoders.image(
        encoded, device="mixed", output_type=types.RGB, hw_decoder_load=hw_decoder_load
    )


def crop_view(
    images: Any, start: Any, end: Any, extent: Any, anchor: Any, mirror: Any, *, square: Square
) -> Any:
    """Make uint8 [size, size, 3] of a float box by the rule of augment/crops.py, then mirror."""
    fn, types, _ = import_dali()
    filters = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
    crop = fn.resize(
        images,
        size=extent,
        roi_start=start,
        roi_end=end,
        interp_type=filters[square.interpolation],
        antialias=True,
    )
    # Of boxes inside their pictures this is all of it.
    crop = fn.slice(
        crop,
        start=anchor,
        shape=[square.size, square.size],
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=square.fill,
    )
    return fn.flip(crop, horizontal=mirror)


def build_file_pipeline(
    source: Callable[[], tuple[Any, ...]],
    *,
    read: bool,
    images: int,
    num_views: int,
    augment: AugmentConfig,
    square: Square,
    device: torch.device,
    num_threads: int,
    prefetch: int,
    hw_decoder_load: float,
) -> Any:
    """A built pipeline with one output per view: float32 [images, size, size, 3], normalised.

    Args:
        source: gives a step's images (list of `path_array`, or of `encoded_array`), their heights
            and widths as listed (int64 [images, 1] each), then the `VIEW_INPUTS` of each view.
        read: whether the images are paths.

    View 0 is the weak one. After a file that cannot be decoded a new pipeline is needed, since
    tables stay on the host and wait there for their views.
    """
    fn, _, _ = import_dali()
    gpu = device.type == "cuda"
    tables: list[deque[np.ndarray]] = [deque() for _ in range(num_views)]
    of_weak, of_strong = len(VIEW_INPUTS) - 1, len(VIEW_INPUTS)

    def pixel_inputs() -> tuple[Any, ...]:
        files, height, width, *inputs = source()
        kept = [files, height, width, *inputs[:of_weak]]
        for v in range(1, num_views):
            *crop, table = inputs[of_strong * v - 1 : of_strong * (v + 1) - 1]
            kept += crop
            tables[v].append(table)
        return tuple(kept)

    def graph() -> Any:
        files, height, width, *inputs = fn.external_source(
            source=pixel_inputs, num_outputs=3 + of_weak * num_views, batch=True
        )
        decoded = decode(files, height, width, read=read, gpu=gpu, hw_decoder_load=hw_decoder_load)
        outputs = []
        for v in range(num_views):
            own = inputs[of_weak * v : of_weak * (v + 1)]
            view = crop_view(decoded, *own, square=square)
            if v:
                view = strong_view(view, tables[v].popleft, gpu=gpu)
            outputs.append(normalise(view, mean=augment.mean, std=augment.std))
        return tuple(outputs)

    return built(graph, images, device, num_threads, prefetch)


class GraphDecoder:
    """The graph's own decoder for one file at a time, outside of training; for one thread."""

    def __init__(self, device: torch.device = CPU) -> None:
        fn, _, _ = import_dali()
        self._gpu = gpu = device.type == "cuda"

        def graph() -> Any:
            inputs = fn.external_source(source=lambda: self._inputs, num_outputs=3, batch=True)
            return decode(*inputs, read=False, gpu=gpu)

        self._inputs: tuple[Any, ...] = ()
        self._pipe = built(graph, 1, device, num_threads=1, prefetch=1)

    def __call__(self, encoded: bytes | np.ndarray, width: int, height: int) -> np.ndarray | None:
        """uint8 [H, W, 3]; None where the file is refused, or is not of this size."""
        sizes = (np.array([[side]], np.int64) for side in (height, width))
        self._inputs = ([np.frombuffer(encoded, np.uint8)], *sizes)
        try:
            (output,) = self._pipe.run()
        except RuntimeError:
            return None
        return np.array((output.as_cpu() if self._gpu else output)[0])
