"""Errors that a user can cure. The command line prints them as one line and sets the exit code."""


class UserError(ValueError):
    """Something outside the program is wrong: a file, an image, a machine. Exit code 1."""

    exit_code = 1


class PeerError(UserError):
    """Another rank has failed and says why; this one has nothing to add."""


class ConfigError(UserError):
    """The command line or the configuration is wrong. Exit code 2."""

    exit_code = 2


def pip_line(extra: str) -> str:
    """How to get the packages of an extra of setup.py, in a clone and elsewhere."""
    return f"`pip install -e '.[{extra}]'` in a clone, else `pip install 'simpro_fast[{extra}]'`"
