"""Host memory of the training step."""

from __future__ import annotations

import ctypes
import os

# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST_INT = 2**31 - 1


def reuse_freed_memory() -> bool:
    """Let malloc keep what a CPU step frees for the next one.

    Otherwise glibc maps every large activation anew and unmaps it when it is freed, so that each
    step pays for the page faults of its whole working set (docs/performance.md). Costs nothing in
    the peak, which returns every step. Does nothing where the environment already tunes malloc, or
    where the C library is another one.

    Returns:
        whether malloc was told.
    """
    if "GLIBC_TUNABLES" in os.environ or any(k.startswith("MALLOC_") for k in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _LARGEST_INT))
