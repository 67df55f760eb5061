"""TensorBoard event files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Board:
    """TensorBoard events of the scalars in a metrics row; without a folder it does nothing."""

    def __init__(self, folder: Path | None, purge_step: int = 0) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

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
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
