"""Stands in for this folder when Triton was imported before it could be set to interpret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE


def test_kernels_in_their_own_process(runnable: bool) -> None:
    if runnable:
        pytest.skip("the kernel tests run in this process")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).parent),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
