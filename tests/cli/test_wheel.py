"""The wheel: kernels and configurations inside, usable outside a clone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import clean_environment

SOURCES = ("simpro_fast", "kernels", "configs", "setup.py", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that no build folder is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    no_cache = shutil.ignore_patterns("__pycache__")  # others may be writing to it
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=no_cache)
        else:
            shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [
            *[sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"],
            *["--no-build-isolation", "--wheel-dir", str(folder), str(source)],
        ],
        check=True,
        env=clean_environment(),
    )
    return next(folder.glob("simpro_fast-*.whl"))


def test_holds_kernels_and_every_config(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for config in (ROOT / "configs").glob("*/*.yaml"):
        assert f"simpro_fast/configs/{config.relative_to(ROOT / 'configs')}" in names
    for table in (ROOT / "simpro_fast/data/datasets/imagenet_lists").glob("*.json"):
        assert f"simpro_fast/data/datasets/imagenet_lists/{table.name}" in names
    for module in (ROOT / "kernels").rglob("*.py"):
        assert f"simpro_kernels/{module.relative_to(ROOT / 'kernels')}" in names
    assert not {n.split("/")[0] for n in names} & {"tests", "bench", "launch", "kernels"}


def test_works_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked where nothing else of ours is; the command reads a shipped configuration."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import sys, simpro_fast, simpro_kernels; from simpro_fast.cli.train import main; "
        "print(simpro_fast.__file__, simpro_kernels.__file__); "
        "sys.exit(main(['--config', 'digits_lt/reversed', '--print-config']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**clean_environment(), "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].count(str(site)) == 2
    assert "name: digits_lt/reversed" in done.stdout


@pytest.mark.parametrize(("package", "said"), [("pip", ""), ("no-such-package", "ERROR: ")])
def test_set_up_says_errors_alone(package: str, said: str) -> None:
    """pip warns of a place without packages; the set-up's pip keeps that to itself."""
    (words,) = re.findall(r"^INSTALL := python (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    places = ["--no-index", "--find-links=/no/such/folder"]
    done = subprocess.run(
        [sys.executable, *words.split(), "--dry-run", *places, package],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "" and (done.returncode != 0) is bool(said)
    lines = done.stderr.splitlines()
    assert bool(lines) is bool(said) and all(line.startswith(said) for line in lines)
