"""Files of a run directory that tell of its training: their schemas, and the readers of all verbs.

Beside them: `config.yaml` (config/saved.py), `split.json` (data/splits) and `model.json`
(answers).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import Count, FileSchema, checked, read_as
from simpro_fast.utils.regular_file import read_regular

SUMMARY, METRICS, ENVIRONMENT = "summary.json", "metrics.jsonl", "environment.json"

_ROUNDED = 1e-6
"""By which rounding may carry a sum of shares beyond 1."""
Percent = Annotated[float, Field(ge=0, le=100 + _ROUNDED)]
Share = Annotated[float, Field(ge=0, le=1 + _ROUNDED)]
Nats = Annotated[float, Field(ge=-_ROUNDED, le=1e6)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
"""Seconds, views per second, MiB."""


class ShareRow(FileSchema):
    """Share of a class in the unlabeled images, with the bounds of its 95 % interval."""

    name: str | int | None = Field(None, alias="class")
    estimate: Share | None = None
    low: Share | None = None
    high: Share | None = None


class SharesEstimate(FileSchema):
    """Class shares of the unlabeled images, see `answers.class_shares.estimate_shares`."""

    method: str | None = None
    images: Count | None = None
    unseen: Count | None = None
    unreadable: Count | None = None
    converged: bool | None = None
    consistent: bool | None = None
    rows: list[ShareRow] | None = None


class ReliabilityBin(FileSchema):
    """Test images of similar confidence."""

    count: Count
    confidence: Share | None = None
    accuracy: Share | None = None

    @model_validator(mode="after")
    def _check(self) -> ReliabilityBin:
        if self.count and (self.confidence is None or self.accuracy is None):
            raise ValueError("a bin with images must have confidence and accuracy")
        return self


class Reliability(FileSchema):
    """Confidence against accuracy."""

    bins: list[ReliabilityBin]


class Summary(FileSchema):
    """The content of `summary.json`, see `training.results.summarise`; older ones lack some."""

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    method: str
    steps: Count
    top1: Percent | None
    per_class: list[Percent | None] | None
    class_names: Annotated[list[str], Field(min_length=1)]
    pi_u: list[Share] | None
    top1_class_mean: Percent | None = None
    probe_class_mean: Percent | None = None
    neighbour_class_mean: Percent | None = None
    top1_mean_last20: Percent | None = None
    top1_best: Percent | None = None
    top_k: Count | None = None
    top_k_accuracy: Percent | None = None
    ece: Share | None = None
    log_likelihood: float | None = None
    temperature: Amount | None = None
    confusion: list[list[Count]] | None = None
    reliability: Reliability | None = None
    many: Percent | None = None
    medium: Percent | None = None
    few: Percent | None = None
    shares: SharesEstimate | None = None
    kl_pi_u: Nats | None = None
    pi_u_true: list[Share] | None = None
    labeled_counts: list[Count] | None = None
    labeled_draws: list[Count] | None = None
    unlabeled_counts: list[Count] | None = None
    test_counts: list[Count] | None = None
    images_replaced: Count | None = None
    seconds: Amount | None = None
    images_per_second: Amount | None = None
    commit: str | None = None
    machine: str | None = None

    @model_validator(mode="after")
    def _check_classes(self) -> Summary:
        classes = len(self.class_names)
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, list) and len(value) != classes:
                raise ValueError(f"{key} must have a value for each of {classes} classes")
        if self.confusion is not None and {*map(len, self.confusion)} != {classes}:
            raise ValueError(f"confusion must be {classes} x {classes} counts")
        return self


class MetricsRow(FileSchema):
    """A line of `metrics.jsonl`, one period."""

    step: Count
    period: Count | None = None
    lr: float | None = None
    loss: float | None = None
    loss_labeled: float | None = None
    loss_unlabeled: float | None = None
    mask_rate: Share | None = None
    pseudo_label_accuracy: Percent | None = None
    mask_rate_per_class: list[Share | None] | None = None
    pseudo_label_accuracy_per_class: list[Percent | None] | None = None
    labeled_draws: list[Count] | None = None
    pi_u: list[Share] | None = None
    phi: list[Share] | None = None
    kl_pi_u: Nats | None = None
    top1: Percent | None = None
    top1_class_mean: Percent | None = None
    per_class: list[Percent | None] | None = None
    images_per_second: Amount | None = None
    data_wait_fraction: Share | None = None
    peak_memory_mib: Amount | None = None


class Environment(FileSchema):
    """The content of `environment.json`, see `run.directory.environment`."""

    versions: dict[str, str] | None = None
    commit: str | None = None
    machine: str | None = None
    world_size: Count | None = None
    device: str | None = None
    torch_threads: Count | None = None
    data: str | None = None
    split: str | None = None


def read_summary(path: Path) -> dict[str, Any]:
    """The keys of a `summary.json` as they are set there. Raises as `read_as`."""
    return read_as(path, Summary).model_dump(by_alias=True, exclude_unset=True)


def read_environment(path: Path) -> dict[str, Any]:
    """The keys of an `environment.json` as they are set there. Raises as `read_as`."""
    return read_as(path, Environment).model_dump(exclude_unset=True)


def metrics_row(text: str, where: object, classes: int | None = None) -> dict[str, Any]:
    """The keys of a line of metrics as they are set there.

    Args:
        classes: values that every list must have; None: not known.

    Raises:
        UserError: it is none; says so of `where`.
    """
    if not _is_json(text):
        raise UserError(f"{where} is not JSON")
    row = checked(json.loads(text), MetricsRow, where).model_dump(exclude_unset=True)
    for key, value in row.items():
        if classes is not None and isinstance(value, list) and len(value) != classes:
            raise UserError(f"{where} is damaged ({key}: {len(value)} values of {classes} classes)")
    return row


def read_metrics(path: Path, classes: int | None = None) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line cut short by a killed run is left out.

    Args:
        classes: as in `metrics_row`.

    Raises:
        UserError: the file cannot be read, or a line is damaged; names it.
    """
    try:
        lines = read_regular(path).decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if lines and not _is_json(lines[-1]):
        del lines[-1]
    return [metrics_row(line, f"{path}: line {n}", classes) for n, line in enumerate(lines, 1)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
