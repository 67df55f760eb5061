"""What the pages name exists: links, files, configuration keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from simpro_fast.config import Config
from simpro_fast.config.methods import METHODS
from tests.conftest import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "configs/README.md", "bench/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = ("simpro_fast", "kernels", "tests", "bench", "launch", "configs", "docs")
FILES = {
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.*")
}
SECTIONS = {
    name: set(field.annotation.model_fields)
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
SECTIONS["method"] |= {key for entry in METHODS.values() for key in entry.keys.model_fields}
KEY = rf"({'|'.join(SECTIONS)})\.([a-z]\w*)"


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The fragments under which headings are shown."""
    headings = re.findall(r"^#+ (.*)$", read(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = read(page)
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(link)
    for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text):
        if not (ROOT / path).exists():
            wrong.append(path)
    for name in re.findall(r"`([\w./-]+\.(?:py|sh|md))`", text):
        if not any(file.endswith(f"/{name}") for file in FILES):
            wrong.append(name)
    # In backticks, or set in a command; a file such as `model.json` is no key.
    for pattern in (rf"`{KEY}(?:[=: ][^`]*)?`", rf"(?<![\w./]){KEY}="):
        for section, key in re.findall(pattern, text):
            if key not in SECTIONS[section] and key not in ("safetensors", "json"):
                wrong.append(f"{section}.{key}")
    assert not wrong, f"{page}: {wrong}"
