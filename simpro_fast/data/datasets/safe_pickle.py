"""Reading pickled archives of uint8 images without running anything that is in them.

`pickle.load` calls whatever a file names. Here every admitted name is answered by a stand-in of
our own (`_Array`, `_Dtype`, ...), so neither a foreign function nor numpy's own unpickling code,
which trusts its input, ever sees the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from simpro_fast.utils.errors import UserError

# Element types that the published archives use; anything else is refused.
_DTYPES = {"u1": np.uint8, "i4": np.int32, "i8": np.int64, "f8": np.float64}


class _Refused(Exception):
    """A name or a value in the file that image archives do not need."""


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Dtype:
    """Stands in for `numpy.dtype`: an element type from `_DTYPES` and its byte order."""

    def __init__(self, spec: object, align: object = False, copy: object = True) -> None:
        self.code = _text(spec)
        self.order = "|"
        if self.code not in _DTYPES:
            raise _Refused(f"numpy.dtype({self.code!r})")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        if order not in ("|", "<", ">", "="):
            raise _Refused(f"numpy.dtype with byte order {order!r}")
        self.order = order

    def resolve(self) -> np.dtype[Any]:
        order = "=" if self.order == "|" else self.order
        return np.dtype(_DTYPES[self.code]).newbyteorder(order)  # type: ignore[arg-type]


class _Array:
    """Stands in for `numpy.ndarray` while the file is read; `resolve` gives the array."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, (bytes, str)):
            raise _Refused("numpy.ndarray of objects")
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        self.value = _to_array(data, dtype, shape, bool(fortran))

    def resolve(self) -> np.ndarray:
        if self.value is None:
            raise _Refused("numpy.ndarray without contents")
        return self.value


def _to_array(data: bytes, dtype: _Dtype, shape: Any, fortran: bool) -> np.ndarray:
    flat = np.frombuffer(data, dtype.resolve())
    return flat.reshape(tuple(int(n) for n in shape), order="F" if fortran else "C").copy()


def _reconstruct(kind: object, shape: object, typecode: object) -> _Array:
    if kind is not _Array:
        raise _Refused("numpy.core.multiarray._reconstruct of another type")
    return _Array()


def _frombuffer(data: object, dtype: object, shape: object, order: object) -> _Array:
    """How numpy writes an array with pickle protocol 5."""
    if not isinstance(data, (bytes, bytearray)) or not isinstance(dtype, _Dtype):
        raise _Refused("numpy.core.numeric._frombuffer of another type")
    array = _Array()
    array.value = _to_array(bytes(data), dtype, shape, _text(order) == "F")
    return array


def _scalar(dtype: object, data: object) -> Any:
    """How numpy writes one number, such as a label taken out of an array."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, str)):
        raise _Refused("numpy.core.multiarray.scalar of another type")
    raw = data.encode("latin1") if isinstance(data, str) else data
    return _to_array(raw, dtype, (), False).item()


def _encode(text: object, encoding: object) -> bytes:
    """How Python 3 writes bytes with pickle protocol 2."""
    if not isinstance(text, str) or _text(encoding) != "latin1":
        raise _Refused(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    return b""


# Names in the files, in numpy's spelling before and since 2.0, and Python's before and since 3.
_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _empty_bytes,
    ("builtins", "bytes"): _empty_bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def _resolve(value: Any) -> Any:
    """Replace the stand-ins by arrays; keys become text in the way Python 2 meant them."""
    if isinstance(value, dict):
        return {_text(key): _resolve(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item) for item in value)
    return value.resolve() if isinstance(value, (_Array, _Dtype)) else value


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
