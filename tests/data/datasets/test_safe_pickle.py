"""The unpickler reads what image archives hold and refuses the rest by name."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest

from simpro_fast.data.datasets.safe_pickle import load_pickled_dict
from simpro_fast.utils.errors import UserError


def load(content: bytes) -> dict:
    return load_pickled_dict(io.BytesIO(content), "train.pkl")


# One CIFAR-like batch of two 3-byte images, byte by byte as Python 2's cPickle wrote it.
GOLDEN = (
    b"\x80\x02}q\x01("  # protocol 2, empty dict, memo 1, mark
    b"U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
    b"U\x06labelsq\x04]q\x05(K\x06K\x09e"
    b"U\x04dataq\x06"
    b"cnumpy.core.multiarray\n_reconstruct\nq\x07"
    b"cnumpy\nndarray\nq\x08"
    b"K\x00\x85U\x01b\x87Rq\x09"
    b"(K\x01K\x02K\x03\x86"  # version 1, shape (2, 3)
    b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"\x89U\x06\x00\x01\x7f\x80\xfe\xfftb"  # not Fortran, six bytes
    b"U\x09filenamesq\x0c]q\x0d(U\x05a.pngU\x05b.pngeu."
)


@pytest.mark.parametrize("spelling", [b"numpy.core.", b"numpy._core."])
def test_golden_python2_batch(spelling: bytes) -> None:
    content = load(GOLDEN.replace(b"numpy.core.", spelling))
    assert list(content) == ["batch_label", "labels", "data", "filenames"]
    assert content["batch_label"] == "training batch 1 of 5"
    assert content["labels"] == [6, 9]
    assert content["filenames"] == ["a.png", "b.png"]
    assert content["data"].dtype == np.uint8
    np.testing.assert_array_equal(content["data"], [[0, 1, 127], [128, 254, 255]])


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_written_by_this_numpy(protocol: int, order: str) -> None:
    data = np.asarray(np.arange(12, dtype=np.uint8).reshape(3, 4), order=order)
    labels = np.array([3, 1, 2], dtype=">i8")
    content = load(pickle.dumps({b"data": data, "labels": labels, "b": b""}, protocol=protocol))
    np.testing.assert_array_equal(content["data"], data)
    assert content["data"].dtype == np.uint8
    assert content["labels"].tolist() == [3, 1, 2]
    assert content["data"].flags.writeable


@pytest.mark.parametrize("protocol", range(6))
def test_numbers_written_by_numpy(protocol: int) -> None:
    labels = [np.int64(3), np.uint8(7), np.float64(0.5)]
    content = pickle.dumps({"labels": labels}, protocol=protocol)
    assert load(content)["labels"] == [3, 7, 0.5]


@pytest.mark.parametrize(
    ("opcodes", "named"),
    [
        (b"cos\nsystem\n(U\x04truetR.", "os.system"),
        (b"c__builtin__\neval\n(U\x011tR.", "__builtin__.eval"),
        (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
        (b"cnumpy\nload\n.", "numpy.load"),
        # numpy.ndarray.tofile would be reachable where dotted names are followed
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "numpy.ndarray.tofile"),
    ],
)
def test_names_outside_the_list_are_refused(opcodes: bytes, named: str) -> None:
    with pytest.raises(UserError, match="refused to load " + named.replace(".", r"\.")):
        load(opcodes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": np.array([{}], dtype=object)}), r"refused to load numpy\.dtype"),
        # The same as a number, which numpy itself would take for an address.
        (b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(U\x01OtRU\x08AAAAAAAAtR.", "refused"),
        (GOLDEN.replace(b"K\x01K\x02K\x03\x86", b"K\x01K\x02K\x04\x86"), "damaged"),
        *((content, "damaged") for content in (b"", b"hello", GOLDEN[:-40], b"<html></html>")),
        (pickle.dumps([1, 2]), "expected a dictionary"),
    ],
)
def test_anything_else_is_refused_on_one_line(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=rf"train\.pkl: .*{message}") as info:
        load(content)
    assert "\n" not in str(info.value)
