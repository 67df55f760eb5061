"""A `map` in threads, for work that leaves Python's lock: reading, hashing, decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    function: Callable[[T], R], items: Iterable[T], threads: int, ahead: int = 64
) -> Generator[R, None, None]:
    """`map` in threads with a bounded number of results in flight; stops cleanly when closed."""
    pool = ThreadPoolExecutor(threads)
    try:
        rest = iter(items)
        waiting = deque(pool.submit(function, item) for item in islice(rest, ahead))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(rest, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
