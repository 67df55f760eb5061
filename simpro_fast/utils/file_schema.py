"""JSON files that are held against a schema before anything is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simpro_fast.utils.atomic_write import read_json
from simpro_fast.utils.errors import UserError

Count = Annotated[int, Field(ge=0, le=1 << 53)]


class FileSchema(BaseModel):
    """Base of all schemas: no value is converted, numbers are finite, other keys are left out."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


# Of pydantic's words those that name Python's types.
_SAID = {"missing": "missing", "model_type": "not an object", "dict_type": "not an object"}

Schema = TypeVar("Schema", bound=BaseModel)


def read_as(path: Path, schema: type[Schema]) -> Schema:
    """The JSON object in a file.

    Raises:
        UserError: it cannot be read, or a value is none that the schema allows; names both.
    """
    return checked(read_json(path), schema, path)


def checked(content: Any, schema: type[Schema], where: object) -> Schema:
    """`content`, plain data, as `schema` has it.

    Args:
        where: it comes from, for the error.

    Raises:
        UserError: a value is missing or none that the schema allows; names the first such.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))[:200]
        said = _SAID.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise UserError(f"{where} is damaged ({f'{key}: ' if key else ''}{said})") from None
