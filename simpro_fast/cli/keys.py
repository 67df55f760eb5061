"""`simpro-fast keys`: every key of the configuration, with type, default and meaning."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from simpro_fast.cli.ending import DONE, verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.config import Config
from simpro_fast.config.methods import METHODS, MethodConfig
from simpro_fast.config.section import Section
from simpro_fast.utils.errors import ConfigError

DESCRIPTION = """\
List the keys of the configuration: type, default, what they mean, and whether a run may go on with
another value.

examples:
  simpro-fast keys
  simpro-fast keys data
  simpro-fast keys optim.lr
  simpro-fast keys cossl"""
EPILOG = """\
`simpro-fast train CONFIG --print-config` shows the values of a configuration. Exit code: 0 done,
2 wrong usage."""
RESUME = {
    "nothing": "A run may go on with another value",
    "rounding": "A run may go on with another value, which may round otherwise",
    "length": "A run goes on with another value after a warning",
    "training": "",
}
_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}


class Key(NamedTuple):
    """A key of the configuration."""

    name: str
    """`section.key`; of one method's own keys `method.key`."""
    of: str
    """Section, or `method.name=...` for keys of that method alone."""
    kind: str
    default: str
    text: str
    resume: str

    @property
    def told(self) -> str:
        """All of it in sentences."""
        return ". ".join(part.rstrip(".") for part in (self.text, self.resume) if part)


def all_keys() -> list[Key]:
    """Every key, in the order of the schema; keys of single methods after those of all."""
    found: list[Key] = []
    of_run = {key.name: key for key in _keys_of(Config, "", "")}
    for name, field in Config.model_fields.items():
        inner = field.annotation
        if name == "method":
            found += _keys_of(MethodConfig, "method.", "method")
            common = {key.name: key for key in found if key.of == "method"}
            for method, entry in METHODS.items():
                own = _keys_of(entry.keys, "method.", f"method.name={method}")
                found += [
                    key
                    for key in own
                    if key.name != "method.name"
                    and (key.name not in common or key.default != common[key.name].default)
                ]
        elif isinstance(inner, type) and issubclass(inner, Section):
            found += _keys_of(inner, f"{name}.", name)
        else:
            found.append(of_run[name])
    return found


def _keys_of(section: type[Section], prefix: str, of: str) -> Iterator[Key]:
    texts, changes = _docstrings(section), section.changes()
    for name, field in section.model_fields.items():
        yield Key(
            prefix + name,
            of,
            _kind(field.annotation) + _bounds(field),
            _default(field),
            texts.get(name, ""),
            RESUME.get(changes.get(name, ""), ""),
        )


def _docstrings(section: type[Section]) -> dict[str, str]:
    """The strings below the fields of a section, those of its bases too."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base is Section or not issubclass(base, Section):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    # In YAML and on the command line it is written null.
                    found[field.target.id] = " ".join(text.value.split()).replace("None", "null")
    return found


def _kind(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return " | ".join(map(str, inside))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_kind, inside)))
    if origin in (tuple, list, dict):
        return "map" if origin is dict else f"list of {_kind(inside[0])}"
    return "null" if annotation is type(None) else _TYPES.get(annotation, "text")


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {bound:g}" if bound < 1e15 else ""
        for part in field.metadata
        for name, sign in signs.items()
        if (bound := getattr(part, name, None)) is not None
    ]
    return "".join(f", {bound}" for bound in found if bound)


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)


def chosen(words: Sequence[str]) -> list[Key]:
    """The keys that words name: a section, a key, a method; all without words.

    Raises:
        ConfigError: a word is none of these.
    """
    keys = all_keys()
    if not words:
        return keys
    found: list[Key] = []
    for word in words:
        by_method = [key for key in keys if key.of == f"method.name={word}"]
        named = [key for key in keys if word in (key.name, key.of, key.name.rpartition(".")[2])]
        if not by_method and not named and word not in METHODS:
            known = {w for key in keys for w in (key.name, key.of, key.name.rpartition(".")[2])}
            near = difflib.get_close_matches(word, [*known, *METHODS], n=1)
            hint = f"did you mean {near[0]}?" if near else "simpro-fast keys lists all"
            raise ConfigError(f"{word} is no key, section or method; {hint}")
        found += by_method or named
    return found


def lines(keys: Sequence[Key]) -> Iterator[str]:
    """As text for a terminal."""
    last = None
    for key in keys:
        if key.of != last and key.of:
            yield f"\n{key.of}" if last is not None else key.of
        last = key.of
        yield f"  {key.name} ({key.kind}; {key.default})"
        yield from textwrap.wrap(key.told, 92, initial_indent="      ", subsequent_indent="      ")


def markdown() -> str:
    """docs/keys.md."""
    keys = all_keys()
    out = [
        "# Keys of the configuration",
        "",
        "Written by `simpro-fast keys --markdown`. On the command line a key is",
        "`section.key=value`, in YAML a section is a mapping. A run goes on with the same values",
        "only, where nothing else is said.",
    ]
    for of in dict.fromkeys(key.of for key in keys):
        title = of or "Of a whole run"
        out += ["", f"## {title}", "", "| key | type | default | |", "|---|---|---|---|"]
        for key in keys:
            if key.of == of:
                cells = (f"`{key.name}`", key.kind, f"`{key.default}`", key.told)
                out.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(out) + "\n"


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """List keys; returns 0, or 2 for a word that is none."""
    parser = CommandParser("simpro-fast keys", DESCRIPTION, EPILOG)
    parser.add_argument("words", nargs="*", metavar="SECTION|KEY|METHOD", help="only these")
    parser.add_argument("--markdown", action="store_true", help="write docs/keys.md to stdout")
    options = parser.parse(arguments)
    text = markdown() if options.markdown else "\n".join((*lines(chosen(options.words)), ""))
    print(text, end="")
    return DONE
