"""Errors that a user can cure. The command line prints them as one line and sets the exit code."""


class UserError(ValueError):
    """Something outside the program is wrong: a file, an image, a machine. Exit code 1."""

    exit_code = 1


class ConfigError(UserError):
    """The command line or the configuration is wrong. Exit code 2."""

    exit_code = 2
