"""An output that cannot be written ends every verb alike: one line with its name, exit code 2."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from simpro_fast.cli.entry import run as run_verb
from tests.answers.trained import train
from tests.data.image_folders import tidy

VERBS = {
    "report": "RUN --output OUT/report",
    "evaluate": "RUN --output OUT/evaluation",
    "shares": "RUN DIGITS --output OUT/shares",
    "predict": "RUN DIGITS --output OUT/a.csv --logits OUT/a.npy",
    "pseudo": "RUN --output OUT/pseudo.csv --queue 3",
    "export": "RUN --hub OUT/hub",
    "prepare": "--labeled PHOTOS/labeled --unlabeled PHOTOS/unlabeled --output OUT/prepared",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "digits").mkdir()
    Image.new("L", (16, 16)).save(folder / "digits" / "a.png")
    photos = tidy(folder / "photos", (1, 1, 1), 2)
    return {"RUN": train(folder).run_dir, "DIGITS": folder / "digits", "PHOTOS": photos}


def arguments(verb: str, places: dict[str, Path], output: Path) -> list[str]:
    text = VERBS[verb]
    for name, path in {**places, "OUT": output}.items():
        text = text.replace(name, str(path))
    return text.split()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """In place of a full disk: the system refuses to write more into any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


IN_THE_WAY, FULL, LATER = "a file in the way", "full", "full in the middle"
CASES = [(verb, trouble) for trouble in (IN_THE_WAY, FULL, LATER) for verb in VERBS]


@pytest.mark.parametrize(("verb", "trouble"), CASES)
def test_it_is_one_line_with_its_name_and_code_2(
    places: dict[str, Path],
    tmp_path: Path,
    verb: str,
    trouble: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    if trouble == IN_THE_WAY:
        output.write_text("mine")
    with largest_file({IN_THE_WAY: 1 << 30, FULL: 0, LATER: 100}[trouble]):
        code = run_verb(verb, arguments(verb, places, output))
    said = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and f"error: {output}" in said and "cannot be written" in said
    assert not list(tmp_path.rglob("*.tmp"))
    if trouble == IN_THE_WAY:
        assert output.read_text() == "mine"
