"""From YAML files and `key.sub=value` overrides to a `Config`, with errors a person can act on."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.reader import ReaderError

from simpro_fast.config.bounds import DEEPEST, check_document, read_bounded, shown
from simpro_fast.config.explain import all_keys, describe, flat_items, nearest
from simpro_fast.config.find import find_config
from simpro_fast.config.methods import DEFAULT, METHODS
from simpro_fast.config.schema import Config, config_class
from simpro_fast.errors import ConfigError
from simpro_fast.utils.regular_file import no_file

_SHOWN = 10
"""Problems of one configuration that are listed."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2 scalars: `1e-3` is a number, `on` and `off` are strings."""

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        if root is not None:
            check_document(root, lambda text: self.resolve(yaml.ScalarNode, text, (True, False)))
        return root

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""))


# From an empty table, since PyYAML follows YAML 1.1: `on` is true, `010` eight and `1e-3` text.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "bool": "true|True|TRUE|false|False|FALSE",
    "null": "~|null|Null|NULL|",
    "int": "[-+]?[0-9][0-9_]*",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _resolver = f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$")
    _Loader.add_implicit_resolver(*_resolver, first=[None])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this loader or another one would read as something else."""

    yaml_implicit_resolvers = (
        _Loader.yaml_implicit_resolvers | yaml.SafeDumper.yaml_implicit_resolvers
    )


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
        section, _, key = item.partition("=")[0].partition(".")
        if section == "method" and "methods" in tree:
            tree["methods"] = _forget_defaults(tree, {key: None})["methods"]
    return tree


def read_values(what: str, text: str) -> list[Any]:
    """Values separated by commas, each read as YAML, as those of overrides are.

    Args:
        what: named in the error.

    Raises:
        ConfigError: it is no YAML.
    """
    try:
        values = yaml.load(f"[{text}]", Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{what}: cannot read the values {shown(text)} as YAML") from None
    return list(values)


def written_value(value: Any) -> str:
    """What an override reads as `value`, on one line."""
    if isinstance(value, str):
        with suppress(ConfigError, yaml.YAMLError):
            if yaml.load(value, Loader=_Loader) == value:
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
    """`tree` with what its section `methods` says of the chosen method put into `method`.

    So one file has the values of an experiment for every method: `methods: {simpro: {tau: 1.0}}`.
    They win over `method` in the same file or a base, and nearer files over them, see
    `_forget_defaults`.

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
        if name not in METHODS and "." not in name:
            raise ConfigError(f"methods: there is no method '{name}'{nearest(name, [*METHODS])}")
    return {**rest, "method": {**method, **defaults.get(method.get("name", DEFAULT), {})}}


def dump_config(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key to plain value, for comparisons."""
    return dict(flat_items(config.model_dump(mode="json"), ""))


def _read_with_bases(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in children:
        raise ConfigError(f"{path}: `base` leads back to this file; remove the circle")
    try:
        tree = yaml.load(read_bounded(path), Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {DEEPEST} deep") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = "" if children else _yaml_problem(error)
        raise ConfigError(f"{path}{_yaml_place(error)} is not valid YAML{reason}") from None
    tree = _without_empty_sections({} if tree is None else tree)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold `key: value` sections, got a {type(tree).__name__}")
    if children:
        _refuse_foreign(tree, known_keys() | {"base": None}, path)
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
    return _merge(_forget_defaults(below, tree.get("method")), tree)


def _forget_defaults(tree: dict[str, Any], method: Any) -> dict[str, Any]:
    """`tree` without those `methods` defaults that a nearer file or the command line sets."""
    if not isinstance(method, dict) or not isinstance(tree.get("methods"), dict):
        return tree
    kept = {
        name: {key: value for key, value in keys.items() if key not in method}
        for name, keys in tree["methods"].items()
        if isinstance(keys, dict)
    }
    return {**tree, "methods": kept}


def known_keys() -> dict[str, Any]:
    """The keys of a configuration file; sections are dictionaries, an empty one holds any key."""
    # What a method of one's own takes is not known before it is imported.
    return {**all_keys(Config), "method": {}, "methods": {}}


def _refuse_foreign(tree: dict[str, Any], known: dict[str, Any], path: Path) -> None:
    """A base that is some other YAML file is refused before a value of it is shown anywhere."""
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(f"{path}: `base` must be a configuration; it has no key '{key}'")
        if known[key] is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: `base` must be a configuration; '{key}' is a section")
            if known[key]:
                _refuse_foreign(value, known[key], path)


def _yaml_place(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return ""
    mark = error.problem_mark or error.context_mark
    return f", line {mark.line + 1}, column {mark.column + 1}," if mark is not None else ""


def _yaml_problem(error: Exception) -> str:
    """The reason on one line; PyYAML's own text quotes the source over several."""
    reason = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        reason = ": ".join(part for part in (error.context, error.problem) if part)
    elif isinstance(error, ReaderError):
        reason = f"{error.reason} (character {error.position + 1})"
    return f": {' '.join(reason.split())[:300]}"


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
    try:
        value = yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"override {key[:64]}: {error}") from None
    except (yaml.YAMLError, RecursionError):
        said = shown(text)
        raise ConfigError(f"override {key[:64]}: cannot read the value {said} as YAML") from None
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(item)}: {section} is a value, not a section")
    node[last] = value
