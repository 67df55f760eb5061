"""What of a run or a command is shown while it works."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from simpro_fast.utils.progress import ProgressBar, RunProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(mode: str, *, main: bool = True) -> None:
    progress = RunProgress(mode, 20, 64, main=main)
    progress.begin(5)
    progress.show(10, 0.5, 0.25, 0.125, 91.0)
    progress.close()


@pytest.mark.parametrize(
    ("mode", "terminal", "main", "bar", "line"),
    [
        ("auto", True, True, True, False),
        ("auto", False, True, False, True),
        ("on", False, True, True, False),
        ("off", True, True, False, False),
        ("auto", True, False, False, False),
        ("auto", False, False, False, False),
    ],
)
def test_a_bar_or_a_line_or_nothing(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    terminal: bool,
    main: bool,
    bar: bool,
    line: bool,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    # One of an earlier test would write to a stream that is closed.
    monkeypatch.setattr(logging.getLogger("simpro_fast"), "handlers", [])
    with caplog.at_level(logging.INFO, "simpro_fast"):
        show(mode, main=main)
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("step 10/20" in drawn and "top-1=91.0 %" in drawn and drawn.endswith("\n")) is bar
    assert bool(drawn) is bar
    assert bool(caplog.messages) is line
    if line:
        assert caplog.messages[0].startswith("step 10/20  ")


def test_values_are_asked_for_twice_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = RunProgress("auto", 20, 64, main=True)
    assert not progress.due()
    progress.begin(0)
    assert not progress.due()
    progress._bar.last_print_t -= 1.0  # type: ignore[union-attr]
    assert progress.due()
    progress.show(1, 0.5, 0.25, None, None)
    assert not progress.due()
    progress.close()


def test_a_reader_that_has_gone_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = RunProgress("auto", 20, 64, main=True)
    progress.begin(0)

    def write(text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(terminal, "write", write)
    progress._bar.last_print_t -= 1.0  # type: ignore[union-attr]
    progress.show(1, 0.5, 0.25, None, None)
    progress.close()


def test_a_command_counts_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, quiet, drawn in ((Terminal(), 0, 1), (Terminal(), 1, 0), (io.StringIO(), 0, 0)):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = ProgressBar("decoded", start=2, shown=not quiet)
        bar(5, 9)
        bar.close()
        assert bool(stream.getvalue()) is bool(drawn)
