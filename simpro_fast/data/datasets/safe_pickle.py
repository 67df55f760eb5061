"""Reading pickled archives of images without running anything that is in them.

`pickle.load` calls whatever a file names; here only what arrays and numbers of numpy need is known.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from simpro_fast.utils.errors import UserError

_DTYPES = ("u1", "i4", "i8", "f8")
"""Element types of the published archives."""


def _dtype(code: Any, *_: object) -> np.dtype[Any]:
    """Of numbers alone: numpy takes the content of an object array for addresses."""
    text = code.decode() if isinstance(code, bytes) else str(code)
    if text.lstrip("|<>=") not in _DTYPES:
        raise pickle.UnpicklingError(f"refused to load numpy.dtype({text!r})")
    return np.dtype(text, align=False, copy=True)  # a shared one would not take the byte order


_ARRAY = np.empty(0, np.uint8)
# By their last name alone, since numpy has moved them: numpy.core.multiarray, numpy._core.numeric.
_OF_NUMPY: dict[str, Any] = {
    "ndarray": np.ndarray,
    "dtype": _dtype,
    "_reconstruct": _ARRAY.__reduce__()[0],
    "_frombuffer": _ARRAY.__reduce_ex__(5)[0],
    "scalar": np.int64(0).__reduce__()[0],
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in _OF_NUMPY:
            return _OF_NUMPY[name]
        if (module, name) == ("_codecs", "encode"):  # bytes in protocol 2
            return lambda text, _: text.encode("latin1")
        if (module, name) in (("__builtin__", "bytes"), ("builtins", "bytes")):
            return bytes
        raise pickle.UnpicklingError(f"refused to load {module}.{name}")


def load_pickled_dict(file: BinaryIO, source: str) -> dict[str, Any]:
    """Read one dictionary of numbers, text, lists and numpy arrays from a pickle file.

    Args:
        file: opened for reading bytes; written by Python 2 or 3.
        source: how errors call the file.

    Raises:
        UserError: the file is damaged, is no such dictionary, or names anything else.
    """
    try:
        content = _Unpickler(file, encoding="latin1").load()
    except Exception as error:  # the pickle machine raises any type on a damaged file
        raise UserError(
            f"{source}: damaged, or not the published file ({type(error).__name__}: {error}); "
            "fetch it again from its home page"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{source}: holds a {type(content).__name__}, expected a dictionary")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in content.items()}


def entry(content: dict[str, Any], key: str, source: Path) -> Any:
    """The value of a key that the file must have; a `UserError` lists what it has instead."""
    if key not in content:
        raise UserError(f"{source}: has no {key!r}, only {', '.join(sorted(content)) or 'nothing'}")
    return content[key]
