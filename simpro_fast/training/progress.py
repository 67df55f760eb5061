"""The progress line of a run."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque

REFRESH_SECONDS = 0.5
RECENT = 10
"""Lines over which speed and ETA are averaged, so that they follow a machine that gets busy."""


class Progress:
    """One live line on a terminal, or one line per period elsewhere.

    Args:
        mode: `auto` (live where stdout is a terminal), `on` (live), `off` (nothing).
        total: steps of the whole run.
        views_per_step: over all ranks.
    """

    def __init__(self, mode: str, total: int, views_per_step: int, *, main: bool) -> None:
        self._stream = sys.stdout
        self._live = mode == "on" or (mode == "auto" and self._stream.isatty())
        self._enabled = main and mode != "off"
        self._total = total
        self._views_per_step = views_per_step
        self._width = 0
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start the clock of speed and ETA after `step` steps."""
        self._shown = time.perf_counter()
        self._marks = deque([(self._shown, step)], maxlen=RECENT)

    def due(self) -> bool:
        """Whether to draw the live line again; only then are values read from the device."""
        now = time.perf_counter()
        return self._enabled and self._live and now - self._shown >= REFRESH_SECONDS

    def show(
        self,
        step: int,
        loss: float,
        mask_rate: float,
        kl_pi_u: float | None,
        top1: float | None = None,
    ) -> None:
        """Draw the state after `step` steps; `top1` is that of the last evaluation, in percent."""
        if not self._enabled:
            return
        self._shown = now = time.perf_counter()
        before, first = self._marks[0]
        done, seconds = step - first, now - before
        self._marks.append((now, step))
        rate = f"{done * self._views_per_step / seconds:,.0f}" if done and seconds else "-"
        eta = clock((self._total - step) * seconds / done) if done else "-"
        self._draw(
            {
                "step": f"{step:>{len(str(self._total))}}/{self._total}",
                "images/s": rate,
                "ETA": eta,
                "loss": f"{loss:.3f}",
                "mask": f"{mask_rate:.2f}",
                **({} if kl_pi_u is None else {"KL(pi_u)": f"{kl_pi_u:.3f}"}),
                **({} if top1 is None else {"top-1": f"{top1:.1f} %"}),
            }
        )

    def _draw(self, values: dict[str, str]) -> None:
        text = "  ".join(
            f"{value} {name}" if name == "images/s" else f"{name} {value}"
            for name, value in values.items()
        )
        if self._live:  # a line that breaks could not be written over
            text = text[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + text.ljust(self._width) if self._live else text + "\n")
        self._width = len(text)

    def close(self) -> None:
        """End the live line, so that what follows starts on a new one."""
        if self._enabled and self._live and self._width:
            self._write("\n")
            self._width = 0

    def _write(self, text: str) -> None:
        """Nobody reads it any more: a launcher that died must not take the state along."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._enabled = False


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"
