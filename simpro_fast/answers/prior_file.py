"""`--prior`: a class distribution by name, or from a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from simpro_fast.answers.estimation.posterior import PRIORS
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.regular_file import no_file, read_text

_SHOWN = 5


def chosen_prior(given: str, class_names: Sequence[str]) -> str | list[float]:
    """Read `--prior`: one of `PRIORS` as it stands, or the shares that a file gives.

    Args:
        given: a name, or a file: JSON `{class: share}`, or CSV with the columns `class,share`.
        class_names: of the model, in its order, which is that of the result.

    Raises:
        ConfigError: neither, no such file, a class that is missing or unknown, a share
            that is no number from 0 on, or no share above 0.
    """
    if given in PRIORS:
        return given
    if said := no_file(Path(given)):
        raise ConfigError(f"--prior {given} is none of {', '.join(PRIORS)}, and no file: it {said}")
    return read_prior(Path(given), class_names)


def read_prior(path: Path, class_names: Sequence[str]) -> list[float]:
    """The shares in a file, in the order of `class_names`.

    Args:
        path: JSON `{class: share}`, CSV with the columns `class,share`, the shares.json of
            `simpro-fast shares`, or the summary.json of a run with such an estimate.

    Raises:
        ConfigError: as `chosen_prior`.
    """
    try:
        text = read_text(path).removeprefix("\ufeff")
        shares = _from_json(text) if path.suffix.lower() == ".json" else _from_csv(text)
    except (OSError, AttributeError, ValueError, TypeError, LookupError, csv.Error) as error:
        raise ConfigError(
            f"{path}: cannot be read as a prior ({error}); write JSON {{class: share}} or CSV with "
            "the columns class,share"
        ) from None
    if unlike := set(class_names) ^ shares.keys():
        raise ConfigError(
            f"{path}: must give a share for each class of the model and no other; it lacks, or has "
            f"besides, {_some(sorted(unlike))}"
        )
    wrong = [name for name in class_names if not 0 <= shares[name] < np.inf]
    if wrong or not sum(shares.values()) > 0:
        raise ConfigError(f"{path}: shares must be numbers from 0 on, not all 0: {_some(wrong)}")
    return [shares[name] for name in class_names]


def _from_json(text: str) -> dict[str, float]:
    found = json.loads(text)
    if isinstance(found.get("shares"), dict):
        found = found["shares"]  # of a summary.json
    if isinstance(found.get("rows"), list):
        return {row["class"]: _number(row["estimate"]) for row in found["rows"]}
    return {name: _number(share) for name, share in found.items()}


def _from_csv(text: str) -> dict[str, float]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if not {"class", "share"} <= set(reader.fieldnames or ()):
        raise ValueError("its first line does not name the columns class and share")
    return {row["class"]: _number(row["share"]) for row in reader}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
