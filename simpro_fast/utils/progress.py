"""How far a command or a run has come: bars of `tqdm.auto`, on a terminal and in a notebook."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from contextlib import suppress

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a notebook without widgets, where the bar is text
    from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
"""Between two looks at a run, whose values must be read from the device."""


def can_move() -> bool:
    """Whether what stderr shows can be written over: a terminal, the output of a notebook."""
    return sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules


def clock(seconds: float) -> str:
    """Seconds as mm:ss or h:mm:ss."""
    return str(tqdm.format_interval(seconds))


class _Bar(tqdm):
    monitor_interval = 0  # no thread of tqdm's


class ProgressBar(_Bar):
    """A bar that goes when it is closed; nothing where it cannot be written over.

    Args:
        verb: what is done to the items, `decoded`.
        items: what they are.
        start: how many an earlier run has done, which says nothing about the speed of this one.
        shown: False: nothing anywhere.
    """

    def __init__(
        self, verb: str, items: str = "files", *, start: int = 0, shown: bool = True
    ) -> None:
        hidden = not (shown and can_move())
        super().__init__(desc=verb, unit=f" {items}", initial=start, leave=False, disable=hidden)

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show that `done` are done, of `total` where that is known."""
        self.total = total
        self.update(done - self.n)


class RunProgress:
    """A bar where it can be written over, else one log line per period; on rank 0 alone.

    Args:
        mode: `log.progress`: `auto`, `on` (a bar everywhere) or `off` (nothing).
        total: steps of the whole run.
        views_per_step: over all ranks.
    """

    def __init__(self, mode: str, total: int, views_per_step: int, *, main: bool) -> None:
        self._shown = main and mode != "off"
        self._moves = self._shown and (mode == "on" or can_move())
        self._total, self._views_per_step = total, views_per_step
        self._bar: _Bar | None = None

    def begin(self, step: int) -> None:
        """Start the clock of speed and ETA after `step` steps."""
        self._mark = time.perf_counter(), step
        if self._moves:
            self._bar = _Bar(
                total=self._total,
                initial=step,
                unit=" views",
                unit_scale=self._views_per_step,
                mininterval=REFRESH_SECONDS,
                miniters=1,
                dynamic_ncols=True,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {rate_fmt}  ETA {remaining}{postfix}",
            )

    def due(self) -> bool:
        """Whether to move the bar; only then are values read from the device."""
        return self._bar is not None and time.time() - self._bar.last_print_t >= REFRESH_SECONDS

    def show(
        self, step: int, loss: float, mask_rate: float, kl_pi_u: float | None, top1: float | None
    ) -> None:
        """Show the state after `step` steps; `top1` is that of the last evaluation, in percent."""
        values = {"loss": f"{loss:.3f}", "mask": f"{mask_rate:.2f}"}
        values |= {} if kl_pi_u is None else {"KL(pi_u)": f"{kl_pi_u:.3f}"}
        values |= {} if top1 is None else {"top-1": f"{top1:.1f} %"}
        place = f"step {step:>{len(str(self._total))}}/{self._total}"
        if self._bar is not None:
            with suppress(OSError):  # nobody reads it any more: the state must not go with them
                self._bar.set_description(place, refresh=False)
                self._bar.set_postfix(values, refresh=False)
                self._bar.update(step - self._bar.n)
        elif self._shown:
            now, (before, first) = time.perf_counter(), self._mark
            speed = (step - first) / (now - before)
            rate, eta = "-", "-"  # a period that an earlier start has trained
            if speed:
                rate = f"{speed * self._views_per_step:,.0f}"
                eta = clock((self._total - step) / speed)
            self._mark = now, step
            text = "  ".join(f"{name} {value}" for name, value in values.items())
            logger.info("%s  %s views/s  ETA %s  %s", place, rate, eta, text)

    def close(self) -> None:
        """Leave the bar as it is, so that what follows starts on a new line."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar = None
