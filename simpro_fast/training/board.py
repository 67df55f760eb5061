"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Board:
    """TensorBoard events of the scalars in a metrics row; without a folder it does nothing."""

    def __init__(self, folder: Path | None, purge_step: int = 0) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def write(self, row: dict[str, Any]) -> None:
        if self._writer is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self._writer.add_scalar(key, value, row["step"])
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
