"""From YAML files and `key.sub=value` overrides to a `Config`, with errors a person can act on."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simpro_fast.config.explain import all_keys, describe, flat_items, nearest, shown
from simpro_fast.config.find import find_config
from simpro_fast.config.methods import DEFAULT, METHODS
from simpro_fast.config.schema import Config, config_class
from simpro_fast.config.yaml_text import dump_yaml, load_yaml
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.regular_file import no_file

_SHOWN = 10
"""Problems of one configuration that are listed."""
_ALL = "all"
"""In `methods`: of every method."""


def load_config(source: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a configuration.

    Args:
        source: a YAML file, or the name of a shipped one such as `digits_lt/reversed`.
        overrides: `key.sub=value` items; the value is read as YAML.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown, or a value is wrong.
    """
    return parse_config(apply_overrides(read_tree(source), overrides or []))


def read_tree(source: str | Path) -> dict[str, Any]:
    """A configuration file merged with its bases, as plain data and not validated.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    return _read_with_bases(find_config(source), ())


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`tree`, changed in place by `key.sub=value` items; the values are read as YAML.

    Raises:
        ConfigError: an item has another form.
    """
    for item in overrides:
        _apply_override(tree, item)
    return tree


def read_values(what: str, text: str) -> list[Any]:
    """Values separated by commas, each read as YAML, as those of overrides are.

    Args:
        what: named in the error.

    Raises:
        ConfigError: it is no YAML.
    """
    return list(load_yaml(f"[{text}]", f"{what}: {shown(text)}"))


def written_value(value: Any) -> str:
    """Write `value` on one line, as an override reads it."""
    if isinstance(value, str):
        with suppress(ConfigError):
            if load_yaml(value, "") == value:
                return value  # needs no quotes
    return json.dumps(value, ensure_ascii=False)


def parse_config(tree: dict[str, Any], *, may_import: bool = True) -> Config:
    """Validate a plain dictionary; every problem of it is named in one `ConfigError`.

    Args:
        may_import: as in `config_class`.
    """
    tree = with_method_defaults(tree)
    schema = config_class(tree.get("method"), may_import=may_import)
    try:
        return schema(**tree)
    except ValidationError as error:
        lines: dict[str, None] = {}
        for problem in error.errors():
            if len(lines) == _SHOWN:
                lines["and more"] = None
                break
            lines[describe(problem, tree, schema)[:500]] = None
        raise ConfigError("; ".join(lines)) from None


def with_method_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` without its section `methods`: what that says of the method is below `method`.

    So the bases have the values of an experiment for every method,
    `methods: {all: {threshold: 0.8}, simpro: {tau: 1.0}}`: first those of all methods, then those
    of the chosen one, and over both whatever a file or the command line says in `method`.

    Raises:
        ConfigError: `methods` does not hold sections by method.
    """
    if "methods" not in tree:
        return tree
    rest = {key: value for key, value in tree.items() if key != "methods"}
    defaults = tree["methods"]
    if not isinstance(defaults, dict) or not all(isinstance(d, dict) for d in defaults.values()):
        raise ConfigError("methods: it holds a section of keys for each method by its name")
    method = tree.get("method", {})
    if not isinstance(method, dict):
        return rest
    for name in defaults:
        if name not in (*METHODS, _ALL) and "." not in name:
            raise ConfigError(f"methods: there is no method '{name}'{nearest(name, [*METHODS])}")
    own = defaults.get(method.get("name", DEFAULT), {})
    return {**rest, "method": {**defaults.get(_ALL, {}), **own, **method}}


def dump_config(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back."""
    return dump_yaml(config.model_dump(mode="json"))


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key to plain value, for comparisons."""
    return dict(flat_items(config.model_dump(mode="json"), ""))


def read_one_file(path: Path) -> dict[str, Any]:
    """The keys of one YAML file as they stand there, `base` among them.

    Raises:
        ConfigError: it is missing or malformed; names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path} is not UTF-8: {error.reason}") from None
    tree = load_yaml(text, str(path))
    tree = _without_empty_sections({} if tree is None else tree)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold `key: value` sections, got a {type(tree).__name__}")
    return tree


def _read_with_bases(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in children:
        raise ConfigError(f"{path}: `base` leads back to this file; remove the circle")
    tree = read_one_file(path)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: `base` must be one file name, got {shown(base)}")
    base_path = path.parent / base
    obstacle = no_file(base_path)
    if obstacle is not None:
        raise ConfigError(f"{path}: base file {str(base_path)[:300]} {obstacle}")
    try:
        below = _read_with_bases(base_path, (*children, path))
    except ConfigError as error:
        if children:  # the file that was named says it once
            raise
        raise ConfigError(f"base of {path}: {error}") from None
    return _merge(below, tree)


def known_keys() -> dict[str, Any]:
    """The keys of a configuration file; sections are dictionaries, an empty one holds any key."""
    # What a method of one's own takes is not known before it is imported.
    return {**all_keys(Config), "method": {}, "methods": {}}


def _without_empty_sections(tree: Any) -> Any:
    """A section whose keys are all commented out reads as null; it means no change."""
    if not isinstance(tree, dict):
        return tree
    sections = {name for name, inner in known_keys().items() if inner is not None}
    return {k: v for k, v in tree.items() if not (v is None and k in sections)}


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _apply_override(tree: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(item)} must look like key.sub=value")
    value = load_yaml(text, f"override {key[:64]}: {shown(text)}")
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(item)}: {section} is a value, not a section")
    node[last] = value
