"""Errors that a user can cure. The command line prints them as one line and sets the exit code."""

import re
import shlex
from importlib import metadata

from simpro_fast.utils.printable import printable


class UserError(ValueError):
    """Something outside the program is wrong: a file, an image, a machine. Exit code 1.

    Its text is one line that can be shown, whatever the names in it are made of.
    """

    exit_code = 1

    def __init__(self, message: object) -> None:
        super().__init__(printable(message))


class PeerError(UserError):
    """Another rank has failed and says why; this one has nothing to add, and ends with its code."""

    def __init__(self, message: object, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(UserError):
    """The command line or the configuration is wrong. Exit code 2."""

    exit_code = 2


class OutputError(UserError):
    """An output cannot be written: no permission, no space, a folder in its place. Exit code 2."""

    exit_code = 2


def pip_line(extra: str) -> str:
    """How to get the packages of an extra of setup.py, with or without a clone."""
    try:
        known = metadata.requires("simpro_fast") or []
    except metadata.PackageNotFoundError:  # a tree that was never installed
        known = []
    marked = [text.partition(";") for text in known]
    wanted = [name.strip() for name, _, when in marked if re.search(rf"extra == .{extra}\W", when)]
    return f"`pip install {shlex.join(wanted or ['-e', f'.[{extra}]'])}`"
