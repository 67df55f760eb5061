"""The rooms of docs/architecture.md, held against the imports of the code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def imports() -> dict[str, set[str]]:
    """Module to the modules of this project that it imports, wherever in the file."""
    names = {}
    for path in (ROOT / "simpro_fast").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names[name] = path
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("simpro_fast"):
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    found[name].add(submodule if submodule in names else str(node.module))
            elif isinstance(node, ast.Import):
                found[name] |= {a.name for a in node.names if a.name in names}
    return found


def levels(title: str) -> dict[str, int]:
    """Room to level, from the table below a heading; rows go from low to high."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {room: level for level, row in enumerate(rows) for room in re.findall(r"`(\w+)", row)}


def room_of(module: str, depth: int) -> str | None:
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else None


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = imports()
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        # A package that re-exports its modules is not one of their imports.
        for target in sorted(graph.get(module, ())):
            visit(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])


@pytest.mark.parametrize(
    ("title", "inside", "depth"), [("Rooms", "", 1), ("Inside data/", "data", 2)]
)
def test_no_room_imports_a_higher_one(title: str, inside: str, depth: int) -> None:
    level = levels(title)
    prefix = f"simpro_fast.{inside}".rstrip(".")
    graph = {m: t for m, t in imports().items() if m.startswith(f"{prefix}.")}
    rooms = {room_of(m, depth) for m in graph} - {None, "__main__"}
    assert rooms == set(level), "the table and the folders differ"
    for module, targets in graph.items():
        mine = room_of(module, depth)
        for target in targets:
            theirs = room_of(target, depth) if target.startswith(f"{prefix}.") else None
            if theirs is None or theirs == mine or mine == "__main__":
                continue
            assert level[theirs] < level[str(mine)], f"{module} imports {target}"
