"""YAML as configurations are written in it: 1.2 scalars, plain values only, no aliases."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.reader import ReaderError

from simpro_fast.utils.errors import ConfigError

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """`1e-3` is a number, `on` and `off` are strings; a key is a string and given once."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Half a kilobyte of aliases can stand for a billion values, or for a list in itself.
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*) are not read; share keys by `base: FILE`"
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = None
            if not isinstance(key, str):
                problem = f"key {str(key)[:64]} is not a name; quote it"
            elif key in found:
                problem = f"key '{key[:64]}' is given twice; keep one"
            if problem is not None:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""))


# From empty tables. PyYAML follows YAML 1.1: `on` is true, `010` eight and `1e-3` text.
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in {
    "bool": "true|True|TRUE|false|False|FALSE",
    "null": "~|null|Null|NULL|",
    "int": "[-+]?[0-9][0-9_]*",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), first=[None])
_Loader.yaml_constructors = {
    tag: function
    for tag, function in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in ("bool", "null", "float", "str", "seq", "map")
}
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this loader or another one would read as something else."""

    yaml_implicit_resolvers = (
        _Loader.yaml_implicit_resolvers | yaml.SafeDumper.yaml_implicit_resolvers
    )

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load_yaml(text: str, what: str) -> Any:
    """The values of a YAML document; nothing that it names is imported or run.

    Args:
        what: named in the error.

    Raises:
        ConfigError: it is none, with its place and reason on one line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise ConfigError(f"{what}{_place(error)} is not valid YAML: {_reason(error)}") from None


def dump_yaml(values: dict[str, Any]) -> str:
    """Write what `load_yaml` reads back, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}," if mark is not None else ""


def _reason(error: Exception) -> str:
    """On one line; PyYAML's own text quotes the source over several."""
    reason = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        reason = ": ".join(part for part in (error.context, error.problem) if part)
    elif isinstance(error, ReaderError):
        reason = f"{error.reason} (character {error.position + 1})"
    elif isinstance(error, RecursionError):
        reason = "it is nested too deep"
    return " ".join(reason.split())[:300]
