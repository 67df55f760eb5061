"""The keys of the configuration, for `--help` and for flags that are keys here."""

from __future__ import annotations

import textwrap

from simpro_fast.config import Config
from simpro_fast.config.foreign import key_of, not_a_key, written
from simpro_fast.config.methods import METHODS


def hint(argument: str) -> str | None:
    """The end of the line about an unknown flag, or None where nothing is known about it."""
    flag, equals, value = argument.lstrip("-").partition("=")
    if said := not_a_key(flag):
        return said
    if found := _key(flag):
        key, more = found
        key = key if "=" in key else f"{key}={value or '...'}"
        return f"; it is a configuration key, without dashes: {key}{more}"
    if equals:
        return f"; configuration keys have no dashes: {argument.lstrip('-')}"
    return None


def known_keys() -> list[str]:
    """All keys, those of every method among them."""
    own = [f"method.{key}" for entry in METHODS.values() for key in entry.keys.own_keys()]
    return list(dict.fromkeys([*Config.changes(), *own]))


def key_lines() -> list[str]:
    """All keys of the configuration, section by section, for `--help`."""
    sections: dict[str, list[str]] = {}
    for dotted in known_keys():
        section, _, key = dotted.rpartition(".")
        sections.setdefault(section, []).append(key)
    lines = []
    for section, keys in sections.items():
        start = f"  {section}: " if section else "  "
        lines += textwrap.wrap(" ".join(keys), 96, initial_indent=start, subsequent_indent="      ")
    return lines


def _key(flag: str) -> tuple[str, str] | None:
    keys, name = known_keys(), written(flag)
    if dotted := [key for key in keys if written(key) == name]:
        return dotted[0], ""
    ends = [key for key in keys if written(key.rpartition(".")[2]) == name]
    return key_of(flag) or next(((key, "") for key in ends), None)
