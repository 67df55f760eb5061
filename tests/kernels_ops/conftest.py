"""Kernels run compiled where there is a CUDA device and interpreted elsewhere."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
HAS_CUDA = torch.cuda.is_available()

# Triton reads the setting when a kernel is decorated, so it must stand before the first import.
if not HAS_CUDA and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

from simpro_kernels import dispatch  # noqa: E402

RUNNABLE = dispatch.HAS_TRITON and (HAS_CUDA or dispatch.INTERPRETED)

# Another folder of the same pytest run has imported Triton: then these tests run as one test, in a
# process of their own.
OWN_PROCESS_TEST = "test_own_process.py"
collect_ignore = (
    [] if RUNNABLE else [p.name for p in HERE.glob("test_*.py") if p.name != OWN_PROCESS_TEST]
)


def _patch_the_language_once_a_launch() -> None:
    """Triton's interpreter does so at every call of a helper, which is most of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[int] = set()

    def once(fn: Any) -> Any:
        names = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if names <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not patched:  # of the launch itself: what helpers add is done anew in the next launch
            restore = scope.restore

            def close() -> None:
                patched.clear()
                restore()

            scope.restore = close
        patched.update(names)
        return scope

    interpreter._patch_lang = once


if dispatch.INTERPRETED:
    _patch_the_language_once_a_launch()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(autouse=True)
def kernels_run_on_the_device_alone(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that does not ask for `device` meets no interpreter, as on a machine with a GPU."""
    if "device" not in request.fixturenames:
        monkeypatch.setattr(dispatch, "INTERPRETED", False)


@pytest.fixture
def runnable() -> bool:
    return RUNNABLE


@pytest.fixture
def nan_in_empty_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs that a kernel does not write are NaN (True for a mask), not lucky zeros."""

    def poisoned(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor.fill_(True) if tensor.dtype == torch.bool else tensor

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    yield
