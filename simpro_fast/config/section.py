"""Base of all sections of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Strict

from simpro_fast.utils.local_files import remote


def _expand(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path cannot hold the character NUL")
    if why := remote(str(path)):
        raise ValueError(why)
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"there is no user {str(path.parts[0])[:64]}") from None


# YAML has no paths: strings are accepted where a path is meant.
FilePath = Annotated[Path, Strict(False), AfterValidator(_expand)]
# One folder may be written without brackets; YAML lists become tuples.
FilePaths = Annotated[
    tuple[FilePath, ...],
    Strict(False),
    BeforeValidator(lambda value: [value] if isinstance(value, str | Path) else value),
]


def _changes(what: str) -> dict[str, Any]:
    return {"json_schema_extra": {"changes": what}}


# Beside a key, in its Field: what another value of it changes in a run that goes on. A key that
# says none of these changes the training, and a run goes on only with the same value.
NOTHING = _changes("nothing")
"""Nothing: where files lie, what is shown, limits; what a path leads to is compared instead."""
ROUNDING = _changes("rounding")
"""The order of summation at most; said in a line."""
LENGTH = _changes("length")
"""The learning rate from there on; said in a warning."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced across types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def changes(cls) -> dict[str, str]:
        """Dotted key to `nothing`, `rounding`, `length` or `training`, of all sections below."""
        found: dict[str, str] = {}
        for name, field in cls.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Section):
                found |= {f"{name}.{key}": what for key, what in inner.changes().items()}
            else:
                extra = field.json_schema_extra
                said = extra.get("changes") if isinstance(extra, dict) else None
                found[name] = str(said or "training")
        return found
