"""The command `prepare` in this process, for the attacks."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from simpro_fast.cli import prepare


def run_prepare(root: Path, *options: str) -> tuple[int, str]:
    """The exit code and all that was printed."""
    folders = [f"--labeled={root}/labeled", f"--unlabeled={root}/unlabeled"]
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = prepare.main([*folders, f"--output={root}/out", *options])
    return code, said.getvalue()


def make_manifest(root: Path, *options: str) -> Path:
    code, said = run_prepare(root, *options)
    assert code == 0, said
    return root / "out/manifest.csv"
