"""CPU seconds of each test, its processes included: `pytest -p tests.cpu_time`.

What a test costs does not depend on what else the machine does, so that suites are compared by
these sums and not by the clock. The twenty dearest tests and the sum are printed at the end; a
fixture counts for the test that first uses it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
_NAME = "cpu_seconds"
_BEFORE = pytest.StashKey[float]()
_seconds: dict[str, float] = {}


def _cpu_seconds() -> float:
    """Of this process, of its ended children, and of all that descend from it and still run."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended in the meantime
            pid = int(entry.name)
            parents[pid] = int(fields[1])
            used[pid] = sum(int(field) for field in fields[11:15]) / TICKS
    ours, total = os.getpid(), 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for pid, seconds in used.items():
        ancestor = parents[pid]
        while ancestor not in (ours, 0) and ancestor in parents:
            ancestor = parents[ancestor]
        total += seconds if ancestor == ours else 0.0
    return total


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = _cpu_seconds()
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    # The report carries it to the process that prints, also from a worker of pytest-xdist.
    item.user_properties.append((_NAME, _cpu_seconds() - item.stash[_BEFORE]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _seconds[report.nodeid] = dict(report.user_properties)[_NAME]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    dearest = sorted(_seconds.items(), key=lambda item: -item[1])[:20]
    terminalreporter.section("CPU seconds of the dearest tests")
    for name, seconds in dearest:
        terminalreporter.write_line(f"{seconds:8.2f}  {name}")
    terminalreporter.write_line(f"{sum(_seconds.values()):8.2f}  all {len(_seconds)} tests")
