"""Names that look alike: Unicode writes one name in several ways, and people in several more.

Names of classes and of files are compared in NFC, where an accent is part of its letter. macOS
writes NFD, where it follows the letter; a Linux file system takes the two for different names, so
a file is opened by the name that its folder has.
"""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import reduce

from simpro_fast.utils.errors import UserError

_NUMBER = re.compile(r"0*([0-9]+?)([.,]0*)?")


def nfc(name: str) -> str:
    """The form in which names are compared."""
    return unicodedata.normalize("NFC", name)


def class_name(text: str, where: str) -> str:
    """A name of a class as it is held, in NFC.

    Raises:
        UserError: its bytes are no UTF-8; says where it stands.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("latin-1")
        raise UserError(
            f"{where}: the name of a class is not UTF-8 (in Latin-1 it would be {shown!r}); save "
            "the table as UTF-8, or rename the folder"
        ) from None
    return nfc(text)


def _without_spaces(name: str) -> str:
    return "".join(name.split())


def _plain_forms(name: str) -> str:
    return unicodedata.normalize("NFKC", name)


def _number(name: str) -> str:
    """Whole numbers without what spreadsheets and pandas add or take away: 007 is 7, and 7.0."""
    match = _NUMBER.fullmatch(name)
    return match[1] if match and name.isascii() else name


_FOLDS: dict[str, Callable[[str], str]] = {
    "case": str.casefold,
    "spaces": _without_spaces,
    "forms of characters (full width, ligatures)": _plain_forms,
    "the form of the number": _number,
}


def _folded(name: str) -> str:
    return reduce(lambda text, fold: fold(text), _FOLDS.values(), nfc(name))


def difference(name: str, other: str) -> str | None:
    """The one thing in which two names differ that a reader hardly sees; None where they do not."""
    if nfc(name) == nfc(other):
        return None if name == other else "Unicode normalisation (NFC and NFD)"
    for what, fold in _FOLDS.items():
        if fold(nfc(name)) == fold(nfc(other)):
            return what
    return " and ".join(_FOLDS) if _folded(name) == _folded(other) else None


def hint(name: str, known: Iterable[str]) -> str:
    """Guess what an unknown name was meant to be, as the end of a sentence."""
    known = list(known)
    for other in known:
        if what := difference(name, other):
            return f"; it differs from {other!r} in {what} alone"
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def look_alikes(names: Iterable[str]) -> list[str]:
    """One sentence for each name that a reader may take for an earlier one."""
    firsts: dict[str, str] = {}
    found = []
    for name in names:
        first = firsts.setdefault(_folded(name), name)
        if what := difference(first, name):
            found.append(f"{first!r} and {name!r} differ in {what} alone")
    return found


def real_path(path: str, listings: dict[str, dict[str, str]]) -> str:
    """The path as its folders spell it, where they do so in another normalisation.

    Args:
        path: absolute; returned as it is where it exists, or where nothing like it does.
        listings: kept between calls: the names of folders that were looked into, by their NFC.
    """
    if path.isascii() or os.path.lexists(path):
        return path
    above, name = os.path.split(path)
    if not name:
        return path
    folder = real_path(above, listings)
    if folder not in listings:
        try:
            listings[folder] = {nfc(entry): entry for entry in os.listdir(folder)}
        except OSError:
            listings[folder] = {}
    return os.path.join(folder, listings[folder].get(nfc(name), name))
