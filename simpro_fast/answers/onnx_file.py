"""A trained network as one ONNX file: raw pixels in, logits and probabilities out."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from simpro_fast.answers.evaluation import network_input
from simpro_fast.answers.model import TrainedModel
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError, pip_line

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INPUT, OUTPUTS = "images", ("logits", "probabilities")
OPSET = 18
TOLERANCE = 1e-4
"""Largest difference of a logit from PyTorch's, as a share of the largest logit (at least 1)."""
_LARGEST = 2**31 - 2**20  # a protobuf message ends at 2 GiB


class _FromPixels(nn.Module):
    """From uint8 [n, S, S, 3] to logits and softmax(logits), float32 [n, K] each."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.network = model.module
        self.mean, self.std = model.file.mean, model.file.std

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(network_input(images, self.mean, self.std, torch.float32))
        return logits, logits.softmax(1)


def check_onnx_packages() -> None:
    """Find out first what cannot be exported.

    Raises:
        UserError: a package is missing, with the pip line.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx needs {', '.join(missing)}: {pip_line('export')}")


def write_onnx(model: TrainedModel, path: Path) -> float:
    """Write the network with its weights and normalisation as one file, and try it.

    Input `images` uint8 [n, S, S, 3] (RGB, any n), outputs `logits` and `probabilities` float32
    [n, K]. The metadata holds strict JSON: `class_names` in the order of the outputs,
    `image_size` S, `fit`, `interpolation` and `fill`, the colour of the bars of `fit` "pad" (how a
    picture becomes the square, see docs/export.md), and what a posterior under another class
    distribution needs (`tau`, `phi`, `labeled_prior`, `pi_u`).

    Args:
        model: on the CPU.

    Returns:
        the largest difference of a logit between ONNX Runtime and PyTorch, on random images.

    Raises:
        UserError: a package is missing, the network cannot be exported or is larger than 2 GiB,
            the file computes something else, or it cannot be written.
    """
    check_onnx_packages()
    size = sum(t.numel() * t.element_size() for t in model.module.state_dict().values())
    if size > _LARGEST:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB, and one ONNX file holds at most 2; "
            "use --hub, or a smaller network"
        )
    content = _graph(model)
    difference = _compare(model, content)
    with replacing(path) as file:
        file.write(content)
    return difference


def _graph(model: TrainedModel) -> bytes:
    file = model.file
    side = file.image_size
    # Two images: the exporter takes a 1 in a shape for a constant.
    pixels = torch.zeros(2, side, side, 3, dtype=torch.uint8)
    try:
        with _quietly():
            program = torch.onnx.export(
                _FromPixels(model).eval(),
                (pixels,),
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        raise UserError(f"{file.model.name} cannot be exported ({reason.strip()[:300]})") from error
    assert program is not None
    for name, value in (
        ("class_names", file.class_names),
        ("image_size", side),
        ("fit", file.fit),
        ("interpolation", file.interpolation),
        ("fill", file.square.fill),
        ("tau", file.tau),
        ("phi", file.phi),
        ("labeled_prior", file.labeled_prior),
        ("pi_u", file.pi_u),
    ):
        program.model.metadata_props[name] = json.dumps(value)
    content: bytes = program.model_proto.SerializeToString()
    return content


def _compare(model: TrainedModel, content: bytes) -> float:
    """ONNX Runtime against PyTorch, for one image and for several."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    side, random, largest = model.file.image_size, np.random.default_rng(0), 0.0
    for count in (1, 3):
        pixels = random.integers(0, 256, (count, side, side, 3), np.uint8)
        expected = model.logits(pixels).numpy()
        found, probabilities = session.run(list(OUTPUTS), {INPUT: pixels})
        difference = float(np.abs(found - expected).max())
        wrong = float(np.abs(probabilities - model.probabilities(expected)).max())
        if not max(difference / max(1.0, np.abs(expected).max()), wrong) < TOLERANCE:
            raise UserError(
                f"the exported network computes something else (logits differ by {difference:.2g});"
                " nothing was written. Try other versions of torch, onnxscript and onnxruntime"
            )
        largest = max(largest, difference)
    return largest


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter warns of its own insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
