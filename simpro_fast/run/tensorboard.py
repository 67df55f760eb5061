"""TensorBoard event files."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpro_fast.errors import UserError, pip_line

logger = logging.getLogger(__name__)


def lacks(key: str, package: str) -> UserError:
    """The error where `key` asks for a package of the extra `report` that cannot be used."""
    return UserError(f"{key}=true needs {package}: {pip_line('report')}; or set {key}=false")


class TensorBoardLog:
    """TensorBoard events of the scalars in a metrics row; without a folder it does nothing.

    Raises:
        UserError: the package is missing, with the pip line.
    """

    def __init__(self, folder: Path | None, purge_step: int = 0) -> None:
        self._writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # not there, too old, or broken
                raise lacks("log.tensorboard", "tensorboard") from None
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, row: dict[str, Any]) -> None:
        """Add the row; a disk that refuses it ends the events and not the run."""
        if self._writer is None:
            return
        try:
            for key, value in row.items():
                if isinstance(value, float):
                    self._writer.add_scalar(key, value, row["step"])
            self._writer.flush()
        except OSError as error:
            logger.warning("TensorBoard events end at step %d: %s", row["step"], error)
            self._writer = None  # its close() would raise the same again

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # as in `write`; the run must not end differently for it
                writer.close()
