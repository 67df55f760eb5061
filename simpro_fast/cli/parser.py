"""The one parser class of all commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from simpro_fast.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Errors as one line with the nearest valid flag, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
