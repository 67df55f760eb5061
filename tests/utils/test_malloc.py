"""malloc keeps what a step frees, unless the user tunes it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A process of its own, since malloc cannot be told to forget. 30 arrays of 8 MiB, one at a time.
PROGRAM = """
import resource
import numpy
from simpro_fast.utils.malloc import reuse_freed_memory
told = reuse_freed_memory()
def touch():
    array = numpy.empty(2**20)
    array.fill(1.0)
for _ in range(3):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    touch()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    pages = 30 * 2**23 // os.sysconf("SC_PAGE_SIZE")
    # numpy asks for huge pages, which would hide most of the faults.
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    found = {}
    for threshold in (None, "131072"):  # glibc's own default, fixed by the variable
        tuned = {} if threshold is None else {"MALLOC_MMAP_THRESHOLD_": threshold}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**environment, **tuned},
            capture_output=True,
            text=True,
            check=True,
        )
        told, faults = done.stdout.split()
        found[told] = int(faults)
    assert found["False"] > pages / 2, "the environment's choice stands"
    assert found["True"] < pages / 100
