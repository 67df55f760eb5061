"""Errors of a configuration, as key, value and cure in words that a person can act on."""

from __future__ import annotations

import difflib
import reprlib
from typing import Any, get_args

from pydantic import BaseModel

from simpro_fast.config.foreign import key_of, not_a_key
from simpro_fast.config.methods import METHODS, MethodConfig, methods_with
from simpro_fast.config.schema import Config

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxlist, _shown.maxdict, _shown.maxtuple = 2, 4, 4, 4
_shown.maxstring = _shown.maxother = 200


def shown(value: Any) -> str:
    """`repr`, cut to about a line whatever the value is."""
    text = _shown.repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


def describe(problem: Any, tree: dict[str, Any], schema: type[Config]) -> str:
    """One problem found by pydantic, as key, value and cure.

    Args:
        problem: of `ValidationError.errors()`. tree: what was validated. schema: against what.
    """
    kind, message = problem["type"], problem["msg"]
    path = [str(part) for part in problem["loc"]]
    # pydantic appends the branch of a union to the location; keep what exists in the input
    keys = _existing_keys(path, tree)
    dotted = ".".join(keys)
    if kind == "extra_forbidden":
        return _foreign_option(keys, schema) or (
            f"unknown key '{dotted[:200]}'{_nearest_key(keys, schema)}"
        )
    if kind == "missing":
        return f"key '{'.'.join(path)}' is missing; set it"
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{dotted}: {message}" if dotted else message
    value = problem["input"]
    annotation = _annotation(keys, schema)
    choices = _literals(annotation)
    if choices and isinstance(value, str):
        allowed = [*choices, *_plain_types(annotation)]
        near = nearest(value, choices)
        return f"{dotted}={shown(value)} is not one of {', '.join(allowed)}{near}"
    # Of pydantic's words those that name Python's types.
    expected = {
        "model_type": "it is a section; set its keys",
        "path_type": "input should be a path in quotes",
    }.get(kind, message[0].lower() + message[1:])
    extra = f" (or one of {', '.join(choices)})" if choices else ""
    return f"{dotted}={'null' if value is None else shown(value)}: {expected}{extra}"


def _existing_keys(path: list[str], tree: Any) -> list[str]:
    keys: list[str] = []
    for part in path:
        if not isinstance(tree, dict) or part not in tree:
            break
        keys.append(part)
        tree = tree[part]
    return keys


def _annotation(keys: list[str], model: Any) -> Any:
    """Return the annotation of a key of `model`, a Config."""
    for key in keys:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
        if key not in model.model_fields:
            return None
        model = model.model_fields[key].annotation
    return model


def _literals(annotation: Any) -> list[str]:
    found: list[str] = []
    for arg in get_args(annotation):
        found += [arg] if isinstance(arg, str) else _literals(arg)
    return found


def _plain_types(annotation: Any) -> list[str]:
    words = {int: "an integer", float: "a number", bool: "true or false"}
    return [words[arg] for arg in get_args(annotation) if arg in words]


def flat_items(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Dotted keys, each behind `prefix`, and their values; an empty section has none."""
    items: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        items += flat_items(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return items


def _foreign_option(keys: list[str], schema: type[Config]) -> str | None:
    """Explain an option that other methods have."""
    if len(keys) != 2 or keys[0] != "method" or not (others := methods_with(keys[1])):
        return None
    mine: type[MethodConfig] = schema.model_fields["method"].annotation  # type: ignore[assignment]
    name = next((n for n, entry in METHODS.items() if entry.keys is mine), "this method")
    own = ", ".join(mine.own_keys()) or "none of its own"
    near = nearest(keys[1], mine.own_keys())
    return (
        f"method.{keys[1]} is an option of {', '.join(others)}, not of {name}{near}; "
        f"its options: {own}"
    )


def _nearest_key(keys: list[str], schema: type[Config]) -> str:
    section = _annotation(keys[:-1], schema) if len(keys) > 1 else schema
    siblings = list(section.model_fields) if hasattr(section, "model_fields") else []
    if said := not_a_key(keys[-1]):
        return said
    if word := key_of(keys[-1]):
        key, more = word
        own = key.rpartition(".")[2]
        mine = len(keys) > 1 and own in siblings and own != "name"
        here = ".".join([*keys[:-1], own]) if mine else key
        return f"; did you mean '{here}'?{more}"
    close = difflib.get_close_matches(keys[-1], siblings, n=1)
    if close:
        return f"; did you mean '{'.'.join([*keys[:-1], close[0]])}'?"
    everywhere = dict(flat_items(all_keys(schema), ""))
    elsewhere = [name for name in everywhere if name.rpartition(".")[2] == keys[-1]]
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}'?"
    return nearest(".".join(keys), list(everywhere))


def all_keys(model: type[BaseModel]) -> dict[str, Any]:
    """The keys of a section: those of sections in it for a section, None for a value."""
    tree: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        nested = isinstance(inner, type) and issubclass(inner, BaseModel)
        tree[name] = all_keys(inner) if nested else None  # type: ignore[arg-type]
    return tree


# Other words for a value, some of which look like a wrong one ("gpu" like "cpu").
_SYNONYMS = {"gpu": "cuda", "float32": "fp32", "float64": "fp64", "double": "fp64"}
_SYNONYMS |= dict.fromkeys(("fp16", "float16", "half", "bfloat16"), "bf16")


def nearest(value: str, choices: list[str]) -> str:
    """`; did you mean ...?` of what is most like `value`, nothing where nothing is."""
    known = _SYNONYMS.get(value.lower())
    if known in choices:
        return f"; did you mean '{known}'?"
    close = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
