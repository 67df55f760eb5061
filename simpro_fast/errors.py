"""Errors that a user can cure. The command line prints them as one line and sets the exit code."""

from simpro_fast.printable import printable


class UserError(ValueError):
    """Something outside the program is wrong: a file, an image, a machine. Exit code 1.

    Its text is one line that can be shown, whatever the names in it are made of.
    """

    exit_code = 1

    def __init__(self, message: object) -> None:
        super().__init__(printable(message))


class PeerError(UserError):
    """Another rank has failed and says why; this one has nothing to add."""


class ConfigError(UserError):
    """The command line or the configuration is wrong. Exit code 2."""

    exit_code = 2


def pip_line(extra: str) -> str:
    """How to get the packages of an extra of setup.py, in a clone and elsewhere."""
    return f"`pip install -e '.[{extra}]'` in a clone, else `pip install 'simpro_fast[{extra}]'`"
