"""Bounds on what a configuration file may hold, and on what an error shows of it.

YAML lets half a kilobyte stand for a billion values, and any text file be read as a mapping; so
sizes are looked at before anything is built of them, and errors never repeat whole lines.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from simpro_fast.errors import ConfigError

MOST_BYTES = 1 << 18
MOST_VALUES = 10_000
DEEPEST = 20
LONGEST_NUMBER = 40
_KEY = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool", "int", "float")}
_NESTED = {f"tag:yaml.org,2002:{name}" for name in ("seq", "map")}

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxlist, _shown.maxdict, _shown.maxtuple = 2, 4, 4, 4
_shown.maxstring = _shown.maxother = 200
_shown.maxlong = LONGEST_NUMBER


def shown(value: Any) -> str:
    """`repr`, cut to about a line whatever the value is."""
    text = _shown.repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


def read_bounded(path: Path) -> str:
    """The text of a file of at most 256 KiB.

    Raises:
        ConfigError: it is larger.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigError(f"is larger than {MOST_BYTES >> 10} KiB, so no configuration")
    return content.decode("utf-8")


def check_document(root: yaml.Node, resolve: Callable[[str], str]) -> None:
    """Refuse what no configuration needs, before values are built.

    Aliases count as often as they are used. Keys that are no names are not repeated: in a file of
    another kind they are its lines.

    Args:
        resolve: the tag that a plain scalar has by its text.

    Raises:
        ConfigError: names the line.
    """
    counts: dict[int, int] = {}
    _count(root, resolve, counts, 0)


def _count(
    node: yaml.Node, resolve: Callable[[str], str], counts: dict[int, int], depth: int
) -> int:
    """Values in a node with aliases expanded, at most `MOST_VALUES`."""
    if depth > DEEPEST:  # an alias within its own anchor, too
        raise ConfigError(f"{_line(node)}: nested more than {DEEPEST} deep")
    if id(node) in counts:
        return counts[id(node)]
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, resolve)
        inner: list[yaml.Node] = []
    elif node.tag not in _NESTED:
        raise ConfigError(f"{_line(node)}: is not valid YAML here, which has no !tags")
    elif isinstance(node, yaml.MappingNode):
        _check_keys(node)
        inner = [value for _, value in node.value]
    else:
        inner = node.value
    total = 1 + sum(_count(value, resolve, counts, depth + 1) for value in inner)
    if total > MOST_VALUES:
        raise ConfigError(f"{_line(node)}: stands for more than {MOST_VALUES} values")
    counts[id(node)] = total
    return total


def _check_scalar(node: yaml.ScalarNode, resolve: Callable[[str], str]) -> None:
    name = node.tag.rpartition(":")[2]
    if node.tag not in _PLAIN:
        raise ConfigError(f"{_line(node)}: is not valid YAML here, which has no !tags")
    if name != "str" and resolve(node.value) != node.tag:
        raise ConfigError(f"{_line(node)}: a value with the tag !!{name} is none")
    if name in ("int", "float") and len(node.value) > LONGEST_NUMBER:
        raise ConfigError(f"{_line(node)}: a number of more than {LONGEST_NUMBER} digits")


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        text = key.value
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{_line(key)}: a list or a section is not a name")
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{_line(key)}: key {text[:64]} is not a name; quote it")
        if text == "<<":
            raise ConfigError(
                f"{_line(key)}: merge keys (<<) are not read; write the keys out, or share them in "
                "a file of their own by `base: FILE`"
            )
        if _KEY.fullmatch(text) is None:
            raise ConfigError(f"{_line(key)}: does not begin with the name of a key")
        if text in seen:
            raise ConfigError(f"{_line(key)}: key '{text}' is given twice; keep one")
        seen.add(text)


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
