"""The notebook of docs/ runs as it stands, with fewer steps; a bar moves below its cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.conftest import ROOT
from tests.processes import PATIENCE, clean_environment

NOTEBOOK = ROOT / "docs" / "tutorial_digits.ipynb"


def outputs(notebook: Any, kind: str) -> list[Any]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [o for cell in cells for o in cell.outputs if o.output_type == kind]


def test_the_notebook_runs_and_its_bar_moves(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps = 60", "steps = 11")
        small = '"evaluate.shares_images=0", "data.mu=2", "name=notebook",'
        cell.source = cell.source.replace('"name=notebook",', small)
    kernel = {**clean_environment(), "PYTHONPATH": f"{ROOT}:{ROOT}/.links", "OMP_NUM_THREADS": "1"}
    NotebookClient(
        notebook,
        timeout=PATIENCE,
        resources={"metadata": {"path": str(tmp_path)}},
        allow_errors=False,
    ).execute(env=kernel)
    assert "step 11/11: 100%" in "".join(o.text for o in outputs(notebook, "stream"))
    assert "11 steps" in "".join(o.text for o in outputs(notebook, "stream"))
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


def test_the_committed_outputs_are_small_and_name_no_place() -> None:
    assert NOTEBOOK.stat().st_size < 60_000
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    said = str(outputs(notebook, "stream"))
    assert "60 steps" in said and "/tmp" not in said and "Traceback" not in str(notebook)
