"""`model.json`: what a trained network needs to be used, beside its weights.

Nothing in it names a place on the machine that trained it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from safetensors.torch import save
from torch import Tensor

from simpro_fast.config.data import Fit, Interpolation
from simpro_fast.config.schema import ModelConfig
from simpro_fast.data.augment.crops import Square
from simpro_fast.utils.atomic_write import replacing, write_json
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.regular_file import no_file, read_text

FORMAT = 3
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
ANEW = (
    "copy or export both files again; in a run directory remove summary.json, if it is there, and "
    "start the training command again, which writes both from the last checkpoint"
)
"""How to get weights and description that can be read and belong together."""

# JSON has lists where these are tuples.
Prior = Annotated[tuple[float, ...], Strict(False)]
Channels = Annotated[tuple[float, float, float], Strict(False)]
Names = Annotated[tuple[str, ...], Strict(False)]
Counts = Annotated[tuple[Annotated[tuple[int, ...], Strict(False)], ...], Strict(False)]


class ModelFile(BaseModel):
    """The content of `model.json`; K classes, priors of length K, each with a positive sum."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False
    )

    format: Literal[3] = 3
    weights_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of the file of the weights, see `write_weights`."""
    model: ModelConfig
    """Architecture; `weights`, a path, is left out."""
    method: str
    class_names: Names
    """In the order of the logits; they win over the order of folders."""
    image_size: int = Field(gt=0, le=4096)  # as data.image_size
    """Side in pixels of the square that the network sees."""
    fit: Fit
    interpolation: Interpolation
    """How a picture becomes the square, as `data.fit` and `data.interpolation`."""
    mean: Channels
    """Per channel, on the scale 0 .. 1."""
    std: Channels
    labeled_prior: Prior
    """Share of each class among the labeled training images."""
    labeled_counts: Annotated[tuple[int, ...], Strict(False)] | None = None
    """Labeled training images of each class; None: not recorded."""
    phi: Prior
    """Estimated class distribution of all images trained on."""
    pi_u: Prior
    """Estimated class distribution of the unlabeled training images."""
    tau: float = Field(ge=0)
    """Strength of the adjustment in the loss, 0 for none: softmax(f + tau log phi) is the posterior
    under the training distribution."""
    confusion: Counts | None = None
    """Validation images by [true class, predicted class]; None: no such set, or K too large."""
    temperature: float | None = Field(None, gt=0)
    """T of softmax(f / T) with the best likelihood on the validation set; None: unknown."""
    step: int
    commit: str | None = None
    versions: dict[str, str] = {}

    @property
    def square(self) -> Square:
        """How a picture becomes what the network sees."""
        return Square.of(self.image_size, self.fit, self.interpolation, self.mean)

    @model_validator(mode="after")
    def _check(self) -> ModelFile:
        classes = len(self.class_names)
        if classes < 2 or len(set(self.class_names)) < classes:
            raise ValueError("class_names must be two or more different names")
        for name in ("labeled_prior", "phi", "pi_u"):
            prior: tuple[float, ...] = getattr(self, name)
            if len(prior) != classes or min(prior) < 0 or not sum(prior) > 0:
                raise ValueError(f"{name} must be {classes} shares with a positive sum")
        rows = self.confusion
        if rows is not None and {len(rows), *map(len, rows)} != {classes}:
            raise ValueError(f"confusion must be {classes} x {classes} counts")
        if rows is not None and min(map(min, rows)) < 0:
            raise ValueError("confusion must hold no count below 0")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        return self

    def write(self, path: Path) -> None:
        """Write strict JSON, whole or not at all."""
        content = self.model_dump(mode="json")
        del content["model"]["weights"]
        write_json(path, content)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, whole or not at all; returns its sha256 for `ModelFile`.

    The same tensors are the same bytes. Whoever stops between this and the description leaves a
    pair that `load_model` refuses, and that the same command makes whole.
    """
    plain = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    content = save(plain, metadata={"format": "pt"})
    with replacing(path) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()


def read_model_file(path: Path) -> ModelFile:
    """Read and check a `model.json`.

    Raises:
        UserError: missing, no JSON, of another format, or a value that cannot be.
    """
    if said := no_file(path):
        raise UserError(f"{path}: {said}; it lies beside {WEIGHTS}, and both are needed")
    try:
        content: Any = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({error}); {ANEW}") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        kind = "of no format" if found is None else f"of format {found}"
        raise UserError(f"{path}: {kind}, this version reads format {FORMAT}; {ANEW}")
    try:
        return ModelFile.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{path} is damaged ({f'{where}: ' if where else ''}{said}); {ANEW}"
        ) from None


def shares(counts: Sequence[float]) -> tuple[float, ...]:
    """Counts as shares; uniform where there are none."""
    total = sum(counts)
    return tuple(c / total if total else 1 / len(counts) for c in counts)
