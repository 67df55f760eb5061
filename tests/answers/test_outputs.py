"""Output files: the same bytes whatever interrupted them, and nothing replaced unasked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from simpro_fast.answers.outputs import Outputs
from simpro_fast.answers.writers import Array, Columns, Format, table_format
from simpro_fast.utils.errors import ConfigError, UserError

KINDS = {"path": "text", "class_id": "integer", "probability": "number", "kept": "flag"}
NAMES = ["a", 'b "quoted", é', None, "line\r\nbreak", "\udcff.jpg"]


def chunk(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "path": [NAMES[(number + i) % 5] for i in range(4)],
        "class_id": [number, None, 2, 3],
        "probability": [*rng.random(3, np.float32), None],
        "kept": [True, False, None, np.bool_(True)],
        "logits": rng.random((4, 3), np.float32),
    }


def formats(path: Path) -> Mapping[Path, Format]:
    return {path: table_format(path, KINDS), path.with_suffix(".npy"): Array(3)}


class Killed(Exception):
    """In the place of a signal."""


def write(path: Path, chunks: int = 6, *, stop: int | None = None, **how: Any) -> Outputs:
    """A run that goes on from whatever there is; dies after `stop` chunks."""
    how = {"resume": True, **how}
    with Outputs(formats(path), {"model": "m", "prior": "none"}, **how) as outputs:
        assert len(outputs.records) * 4 == outputs.rows
        assert [record["number"] for record in outputs.records] == list(range(len(outputs.records)))
        for number in range(outputs.rows // 4, chunks):
            if number == stop:
                raise Killed
            outputs.append(chunk(number), {"number": number})
        outputs.finish()
    return outputs


@pytest.fixture(params=["csv", "jsonl", "parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / "new folder" / f"out.{request.param}"


@pytest.fixture
def whole(path: Path, tmp_path: Path) -> tuple[bytes, bytes]:
    """Bytes of the two files of a run that nothing interrupted."""
    other = tmp_path / "whole" / path.name
    write(other)
    assert sorted(p.name for p in other.parent.iterdir()) == sorted(["out.npy", path.name])
    return other.read_bytes(), other.with_suffix(".npy").read_bytes()


def check(path: Path, whole: tuple[bytes, bytes]) -> None:
    assert (path.read_bytes(), path.with_suffix(".npy").read_bytes()) == whole
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("name", ["3.json", "3.0", "2.1", "start.json"])
def test_a_run_that_died_anywhere_goes_on_to_the_same_bytes(
    path: Path, whole: tuple[bytes, bytes], name: str
) -> None:
    """As a kill, or a power cut, may leave the parts: one is missing or cut short."""
    for cut in (None, 5):
        with pytest.raises(Killed):
            write(path, stop=4)
        (folder,) = path.parent.iterdir()
        assert folder.name == f"{path.name}.parts"
        part = folder / name
        part.unlink() if cut is None else part.write_bytes(part.read_bytes()[:cut])
        outputs = Outputs(formats(path), {"model": "m", "prior": "none"}, resume=True)
        assert outputs.rows == {"start.json": 0, "2.1": 8}.get(name, 12)
        outputs._stack.close()
        write(path)
        check(path, whole)
        for file in path.parent.iterdir():
            file.unlink()


def test_a_kill_between_the_two_names(
    path: Path, whole: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Array, "finish", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        write(path)
    monkeypatch.undo()
    assert path.exists() and not path.with_suffix(".npy").exists()
    assert len(write(path).records) == 6, "nothing is done twice"
    check(path, whole)


def test_the_content(path: Path) -> None:
    write(path, chunks=2)
    array = np.load(path.with_suffix(".npy"))
    np.testing.assert_array_equal(array, np.concatenate([chunk(i)["logits"] for i in range(2)]))
    first = chunk(0)["probability"][0]
    if path.suffix == ".csv":
        text = path.read_bytes()
        assert text.startswith(b'"path","class_id"') or text.startswith(b"path,class_id")
        assert b"\xff.jpg" in text and b"true" in text
        assert np.float32(text.split(b"\n")[1].replace(b'"', b"").split(b",")[2]) == first
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert rows[1]["class_id"] is None and rows[0]["kept"] is True
        assert rows[1]["path"] == NAMES[1] and np.float32(rows[0]["probability"]) == first
    else:
        table = pyarrow.parquet.read_table(path)
        assert table.column_names == list(KINDS) and table.num_rows == 8
        assert table["probability"][0].as_py() == first and table["class_id"][1].as_py() is None
        assert table["path"][4].as_py() == NAMES[1] and table["path"][7].as_py() == "\\udcff.jpg"


def test_parquet_is_cut_into_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpro_fast.answers.writers.ROW_GROUP", 10)
    write(tmp_path / "a.parquet")
    described = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata
    groups = [described.row_group(i).num_rows for i in range(described.num_row_groups)]
    assert groups == [10, 10, 4]


def test_what_is_refused(path: Path) -> None:
    with pytest.raises(Killed):
        write(path, stop=2)
    with pytest.raises(UserError, match=r"stopped after 8 images; .* --resume goes on"):
        write(path, resume=False)
    for key, said in (
        ({"model": "m", "prior": "uniform"}, 'another prior ("none" then, "uniform" now)'),
        ({"model": "n", "prior": "none", "top_k": 5}, 'another model ("m" then, "n" now), top_k'),
    ):
        with pytest.raises(ConfigError) as caught:
            Outputs(formats(path), key, resume=True)
        assert said in str(caught.value) and "--overwrite" in str(caught.value)
    write(path)  # none of these touched it
    with pytest.raises(UserError, match="exists already"):
        write(path)
    assert len(list(path.parent.iterdir())) == 2
    write(path, chunks=3, resume=False, overwrite=True)
    assert len(np.load(path.with_suffix(".npy"))) == 12


def test_every_file_is_held_against_other_runs(path: Path) -> None:
    array = path.with_suffix(".npy")
    for shared in (path, array):
        others = {path.with_name("other.csv"): table_format(path, KINDS), shared: Array(3)}
        with (
            Outputs(formats(path), {}, overwrite=True),
            pytest.raises(UserError, match=f"{shared.name}: another process is writing it"),
        ):
            Outputs(others, {}, overwrite=True)
    assert list(path.parent.iterdir()) == []


def test_only_what_was_found_is_replaced(path: Path, whole: tuple[bytes, bytes]) -> None:
    """Whatever appears or changes under a name during the work stays, and so does the work."""
    array = path.with_suffix(".npy")
    with Outputs(formats(path), {"m": 1}) as outputs:
        outputs.append(chunk(0), {})
        array.write_text("of somebody else")
        with pytest.raises(UserError, match=r"out\.npy: was changed by somebody else"):
            outputs.finish()
    assert array.read_text() == "of somebody else" and not path.exists()
    with pytest.raises(UserError, match="was changed"):
        Outputs(formats(path), {"m": 1}, resume=True)
    with Outputs(formats(path), {"m": 1}, overwrite=True):
        pass
    assert array.read_text() == "of somebody else"
    with pytest.raises(Killed):
        write(path, stop=2, resume=False, overwrite=True)
    write(path)
    check(path, whole)


def test_replacing_is_remembered_by_a_run_that_goes_on(
    path: Path, whole: tuple[bytes, bytes]
) -> None:
    write(path, chunks=1)
    old = path.read_bytes()
    with pytest.raises(Killed):
        write(path, stop=2, resume=False, overwrite=True)
    assert path.read_bytes() == old
    write(path)
    check(path, whole)


def test_nothing_is_left_of_a_run_that_nobody_can_go_on_from(path: Path) -> None:
    with pytest.raises(Killed):
        write(path, stop=0)
    with pytest.raises(Killed), Outputs(formats(path), None) as outputs:
        outputs.append(chunk(0), {})
        raise Killed
    assert list(path.parent.iterdir()) == []


def test_files_that_cannot_be_written(path: Path, tmp_path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(UserError, match="is a folder"):
        write(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "file" / "out.csv")
    with pytest.raises(ConfigError, match=r"ending must be one of \.csv, \.jsonl, \.parquet"):
        table_format(tmp_path / "out.xlsx", KINDS)


def test_numbers_are_short_and_exact(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random(100, np.float32) ** 20
    columns: Columns = {"p": list(values)}
    text = table_format(tmp_path / "a.csv", {"p": "number"}).encode(columns).decode()
    np.testing.assert_array_equal(np.array(text.split(), np.float32), values)
    lines = table_format(tmp_path / "a.jsonl", {"p": "number"}).encode(columns).splitlines()
    np.testing.assert_array_equal(
        np.array([json.loads(line)["p"] for line in lines], np.float32), values
    )
