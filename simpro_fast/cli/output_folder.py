"""`--output` of the verbs that write into a folder, looked at before their work."""

from __future__ import annotations

from pathlib import Path

from simpro_fast.errors import ConfigError, UserError
from simpro_fast.utils.atomic_write import check_writable


def check_output(folder: Path, cure: str = "give another folder") -> None:
    """Make the folder where it is missing, and find out whether files can be written there.

    Raises:
        ConfigError: they cannot.
    """
    try:
        check_writable(folder)
    except UserError as error:
        raise ConfigError(f"--output {error}; {cure}") from None
