"""Fonts that can draw the names: matplotlib's own first, then whatever is installed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

BASE = "DejaVu Sans"


def fonts_for(texts: Iterable[str]) -> tuple[list[str], set[str]]:
    """Families that draw these texts, and the characters that no installed font has.

    Few letters beyond DejaVu cost nothing; only where one is missing are other fonts opened.
    """
    from matplotlib.font_manager import findfont, findSystemFonts, fontManager

    wanted = {c for text in texts for c in text if not c.isspace()}
    missing = {c for c in wanted if ord(c) not in _letters(findfont(BASE))}
    families = [BASE]
    if missing:
        known = {entry.fname for entry in fontManager.ttflist}
        for path in findSystemFonts():  # the list was made once, perhaps before they came
            if path not in known:
                with suppress(OSError, RuntimeError):  # no font that can be used
                    fontManager.addfont(path)
        upright = [
            entry
            for entry in fontManager.ttflist
            if entry.style == "normal"
            and entry.weight in (400, "normal", "regular")
            # The first has a box for everything, the second has pictures for letters.
            and not any(word in entry.name for word in ("Last Resort", "Color", "STIX", "cmr"))
        ]
        # A sans face of the same make fits better beside the others than whatever comes first.
        upright.sort(key=lambda entry: (not entry.name.startswith("Noto Sans"), entry.name))
        for entry in upright:
            if not missing:
                break
            found = {c for c in missing if ord(c) in _letters(entry.fname)}
            if found:
                families.append(entry.name)
                missing -= found
    return families, missing


@cache
def _letters(path: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(path).get_charmap())
    except (OSError, RuntimeError):  # a font that cannot be used after all
        return frozenset()


def drawable(name: str, missing: set[str], otherwise: str) -> str:
    """The name, or something else where a letter of it would be a box."""
    return otherwise if missing.intersection(name) else name
