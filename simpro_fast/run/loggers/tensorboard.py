"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from simpro_fast.run.loggers.base import lacks


class TensorBoardLog:
    """Events in `<run>/tensorboard`.

    Args:
        step: the run stands there; later events of an earlier start are hidden.

    Raises:
        UserError: the package is missing, with the pip line.
    """

    def __init__(self, run_dir: Path, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # not there, too old, or broken
            raise lacks("log.tensorboard", "tensorboard") from None
        # It hides the events of this step, too, which stay true where a run goes on.
        purge = step + 1 if step else 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def figure(self, path: Path, step: int) -> None:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(f"report/{path.stem}", pixels, step, dataformats="HWC")

    def close(self, *, finished: bool) -> None:
        self._writer.close()
