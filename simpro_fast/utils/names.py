"""Names of classes and of files: Unicode writes one name in several ways.

Names of classes and of files are compared in NFC, where an accent is part of its letter. macOS
writes NFD, where it follows the letter; a Linux file system takes the two for different names, so
a file is opened by the name that its folder has.
"""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable

from simpro_fast.utils.errors import UserError


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


def hint(name: str, known: Iterable[str]) -> str:
    """Guess what an unknown name was meant to be, as the end of a sentence."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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
