"""Reading pickled archives of uint8 images without running anything that is in them.

`pickle.load` calls whatever a file names. Here only the names in `_ADMITTED` are known, and each is
answered by a few lines of our own: numpy's own unpickling code trusts its input.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from simpro_fast.utils.errors import UserError

# Element types that the published archives use; anything else is refused.
_DTYPES = {order + code for order in "|<>=" for code in ("u1", "i4", "i8", "f8")}


class _Refused(Exception):
    """A name in the file that image archives do not need."""


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Dtype:
    """Stands in for `numpy.dtype`: code and byte order."""

    def __init__(self, code: object, *_: object) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])


class _Array:
    """Stands in for `numpy.ndarray`, which is made when its content comes."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: object) -> np.ndarray:
    if f"{dtype.order}{dtype.code}" not in _DTYPES:
        raise _Refused(f"numpy.dtype({dtype.code!r})")
    data = raw.encode("latin1") if isinstance(raw, str) else bytes(raw)
    flat = np.frombuffer(data, np.dtype(dtype.code).newbyteorder(dtype.order))
    return flat.reshape(shape, order="F" if _text(order) == "F" else "C").copy()


# By their last name alone, since numpy has moved them: numpy.core.multiarray, numpy._core.numeric.
_OF_NUMPY: dict[str, Callable[..., Any]] = {
    "ndarray": _Array,
    "dtype": _Dtype,
    "_reconstruct": lambda *_: _Array(),
    "_frombuffer": _array,  # of pickle protocol 5
    "scalar": lambda dtype, raw: _array(raw, dtype, (), "C").item(),
}
_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes in protocol 2
    ("__builtin__", "bytes"): bytes,
    ("builtins", "bytes"): bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in _OF_NUMPY:
            return _OF_NUMPY[name]
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        raise _Refused(f"{module}.{name}")


def _resolve(value: Any) -> Any:
    """Replace the stand-ins by arrays; keys become text in the way Python 2 meant them."""
    if isinstance(value, dict):
        return {_text(key): _resolve(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item) for item in value)
    return value.value if isinstance(value, _Array) else value


def load_pickled_dict(file: BinaryIO, source: str) -> dict[str, Any]:
    """Read one dictionary of numbers, text, lists and numpy arrays from a pickle file.

    Args:
        file: opened for reading bytes; pickle protocols 0 to 5, written by Python 2 or 3.
        source: how errors call the file.

    Returns:
        the dictionary; keys are `str`, text written by Python 2 is decoded as latin1.

    Raises:
        UserError: the file is cut short, is no such dictionary, or names anything else than the
            numpy and built-in types of image archives; the message gives that name.
    """
    try:
        content = _resolve(_Unpickler(file, encoding="latin1").load())
    except _Refused as error:
        raise UserError(
            f"{source}: refused to load {error}, which an image archive does not need; "
            "the file is not the published one, fetch it again from its home page"
        ) from None
    except Exception as error:  # the pickle machine raises any type on a damaged file
        raise UserError(
            f"{source}: damaged or not a pickle file ({type(error).__name__}: {error}); "
            "fetch it again"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{source}: holds a {type(content).__name__}, expected a dictionary")
    return content


def entry(content: dict[str, Any], key: str, source: Path) -> Any:
    """The value of a key that the file must have; a `UserError` lists what it has instead."""
    if key not in content:
        raise UserError(f"{source}: has no {key!r}, only {', '.join(sorted(content)) or 'nothing'}")
    return content[key]
