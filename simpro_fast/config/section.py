"""What all sections of the configuration share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Strict

# YAML has no paths: strings are accepted where a path is meant.
FilePath = Annotated[Path, Strict(False), AfterValidator(Path.expanduser)]
# One folder may be written without brackets; YAML lists become tuples.
FilePaths = Annotated[
    tuple[FilePath, ...],
    Strict(False),
    BeforeValidator(lambda value: [value] if isinstance(value, str | Path) else value),
]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced across types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
