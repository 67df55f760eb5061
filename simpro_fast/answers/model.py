"""A trained network, ready to use: `load_model`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from simpro_fast.answers.estimation.posterior import posterior, resolve_prior
from simpro_fast.answers.evaluation import network_input
from simpro_fast.answers.model_file import (
    ANEW,
    DESCRIPTION,
    WEIGHTS,
    ModelFile,
    read_model_file,
)
from simpro_fast.data.augment.crops import whole_square
from simpro_fast.data.files.square import read_square
from simpro_fast.data.files.tar_index import Member
from simpro_fast.models import build_model, needs_import
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.parallel_map import in_order
from simpro_fast.utils.regular_file import no_file, read_regular

Picture = str | os.PathLike[str] | Member | Image.Image | np.ndarray
"""A file, a member of a shard, a picture of Pillow's, or an array uint8 [H, W, 3] or [H, W]."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image."""

    label: str
    """Name of the most probable class."""
    class_id: int
    probability: float
    probabilities: np.ndarray
    """float64 [K], they sum to 1."""


class TrainedModel:
    """The averaged network of a run and what its `model.json` says.

    Attributes:
        module: from float views [n, 3, S, S] to logits [n, K], in eval mode on `device`.
        file: the content of `model.json`.
        device: where `module` is.
    """

    def __init__(self, module: nn.Module, file: ModelFile, device: torch.device) -> None:
        self.module, self.file, self.device = module.to(device).eval(), file, device

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the logits."""
        return self.file.class_names

    def digest(self) -> str:
        """sha256 over `model.json` and its hash of the weights: another may answer otherwise."""
        said = json.dumps(self.file.model_dump(mode="json"))  # ASCII: names may be no UTF-8
        return hashlib.sha256(said.encode()).hexdigest()

    def preprocess(self, picture: Picture) -> np.ndarray:
        """Return the square of a picture that the network sees: uint8 [S, S, 3], as in evaluation.

        Raises:
            UserError: a file that cannot be read; names it.
            ValueError: an array of another type or shape.
        """
        square = self.file.square
        if isinstance(picture, Member):
            return read_square(picture, square)
        if isinstance(picture, str | os.PathLike):
            return read_square(Path(picture), square)
        if isinstance(picture, np.ndarray):
            shape = picture.shape
            if picture.dtype != np.uint8 or not 2 <= len(shape) <= 3 or shape[2:] not in ((), (3,)):
                raise ValueError(
                    f"an image is uint8 [H, W, 3] or [H, W], got {picture.dtype} {list(shape)}"
                )
            if not picture.size:
                raise ValueError(f"an image without pixels: {list(shape)}")
            picture = Image.fromarray(picture)
        return whole_square(picture.convert("RGB"), square)

    @torch.inference_mode()
    def logits(self, pixels: np.ndarray | Tensor) -> Tensor:
        """Plain logits f(x), without adjustment: float32 [n, K] on the CPU.

        Args:
            pixels: uint8 [n, S, S, 3] of `preprocess`; one forward pass, so choose n to fit.
        """
        views = network_input(
            torch.as_tensor(pixels).to(self.device),
            self.file.mean,
            self.file.std,
            next((p.dtype for p in self.module.parameters()), torch.float32),
        )
        return self.module(views).float().cpu()

    def probabilities(
        self, logits: Tensor | np.ndarray, prior: str | Sequence[float] = "none"
    ) -> np.ndarray:
        """float64 [n, K]: softmax(f), or the posterior under a class distribution.

        Args:
            logits: [n, K] of `logits`.
            prior: `none` (the paper's test rule), `uniform`, `labeled`, `estimated` (pi_u of the
                training), or K shares: see `estimation.posterior`.
        """
        file = self.file
        chosen = resolve_prior(prior, labeled=file.labeled_prior, estimated=file.pi_u)
        return posterior(np.asarray(logits, np.float64), chosen, phi=file.phi, tau=file.tau)

    def predict(
        self,
        pictures: Picture | Sequence[Picture] | np.ndarray,
        *,
        prior: str | Sequence[float] = "none",
        batch_size: int = 256,
    ) -> list[Prediction]:
        """Classify pictures; for more than fit into memory see `simpro-fast predict`.

        Args:
            pictures: one, several, or an array uint8 [n, H, W, 3].
            prior: as in `probabilities`.
            batch_size: images per forward pass.

        Raises:
            UserError: a file that cannot be read; names it.
        """
        several: Iterable[Picture]
        if isinstance(pictures, np.ndarray):
            several = pictures if pictures.ndim == 4 else [pictures]
        elif isinstance(pictures, str | os.PathLike | Member | Image.Image):
            several = [pictures]
        else:
            several = pictures
        found = []
        squares = in_order(self.preprocess, several, cpu_cores())
        for batch in iter(lambda: list(islice(squares, batch_size)), []):
            for row in self.probabilities(self.logits(np.stack(batch)), prior):
                k = int(row.argmax())
                found.append(Prediction(self.class_names[k], k, float(row[k]), row))
        return found


def load_model(
    path: str | os.PathLike[str], device: str = "auto", *, trust_code: bool = False
) -> TrainedModel:
    """Load a trained network.

    Args:
        path: a run directory, its `model.safetensors`, or a folder that `export --hub` wrote.
        device: `auto` (a GPU where there is one), `cpu` or `cuda`.
        trust_code: import the module of a network of one's own (`model.name: my_net.build`), which
            runs its code. Whoever wrote `model.json` has chosen the module.

    Raises:
        UserError: no model there, a file is damaged or cut, they do not belong together, the
            format is another version's, a weight is not finite or of another type than the
            network's, or the network is code that is not trusted.
    """
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    weights = given if given.is_file() else folder / WEIGHTS
    if not given.exists():
        raise UserError(f"{given}: no such model; give a run directory or its {WEIGHTS}")
    if not given.is_dir() and weights.suffix != ".safetensors":
        raise UserError(f"{given}: not a model; give a run directory or its {WEIGHTS}")
    if said := no_file(weights):
        if (folder / "config.yaml").is_file():
            raise UserError(
                f"{folder}: the run is not finished, so it has no {WEIGHTS} yet; start its "
                "training command again, which goes on from the last checkpoint"
            )
        raise UserError(f"{weights}: {said}; give a run directory or its {WEIGHTS}")
    file = read_model_file(folder / DESCRIPTION)
    if needs_import(file.model.name) and not trust_code:
        raise UserError(
            f"{folder}: the network is {file.model.name}, code outside simpro_fast; if you trust "
            "it, give --trust-code (load_model(..., trust_code=True)), or register_model first"
        )
    # The kernel that a GPU trained with is not asked for on a machine without one.
    network = file.model.model_copy(update={"norm_impl": "auto"})
    module = build_model(network, len(file.class_names), file.image_size, seed=0, exported=True)
    _fill(module, weights, file.weights_sha256)
    return TrainedModel(module, file, pick_device(device))


def pick_device(device: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device of this machine.

    Raises:
        ConfigError: `cuda` without one.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is visible; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _fill(module: nn.Module, path: Path, sha256: str) -> None:
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(
            f"{path}: its sha256 is not the one in {DESCRIPTION}: it is damaged, cut short, or "
            f"of another model; {ANEW}"
        )
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        first = (str(error).splitlines() or ["damaged"])[0]
        raise UserError(f"{path}: no weights ({first}); {ANEW}") from None
    own = module.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        here, there = (_described(t.get(name)) for t in (own, tensors))
        if here != there:
            raise UserError(
                f"{path}: does not belong to the {DESCRIPTION} beside it: {name} is {there} "
                f"there, {here} in the network that {DESCRIPTION} describes; {ANEW}"
            )
        if not torch.isfinite(tensors[name]).all():
            raise UserError(
                f"{path}: {name} has values that are not finite, so every answer would be wrong; "
                "train again with a lower optim.lr or with optim.grad_clip"
            )
    module.load_state_dict(tensors)


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
