"""`simpro-fast predict`: answers, their order, and what interrupts or refuses them."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from simpro_fast import load_model
from simpro_fast.answers.evaluation import evaluate
from simpro_fast.cli import predict
from simpro_fast.config.schema import Config
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files.manifest import Row, make_manifest, write_manifest
from simpro_fast.data.splits.build import make_split
from tests import processes
from tests.answers.trained import train
from tests.conftest import COMMAND
from tests.data.image_folders import picture, save
from tests.data.tar_shards import jpeg, write_tar
from tests.processes import PATIENCE


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def run(config: Config) -> str:
    return str(config.run_dir)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the messy folder `photos é/`: 6 images, one of them damaged."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos é"
    for i, name in enumerate(("1 a.jpg", "2/b c.png", "2/été.jpg", "3.jpg")):
        save(folder / name, picture(i))
    save(folder / "4.png", Image.new("L", (1, 1), 9))
    (folder / "2" / "broken.jpg").write_bytes(jpeg(1)[:300])
    return folder


ORDER = ["1 a.jpg", "2/b c.png", "2/broken.jpg", "2/été.jpg", "3.jpg", "4.png"]


@pytest.fixture
def command(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Calls the verb in this process; returns exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = predict.main([run, *arguments])
        return code, *capsys.readouterr()

    return call


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_a_messy_folder(
    command: Callable[..., tuple[int, str, str]], run: str, photos: Path
) -> None:
    code, out, err = command("photos é", "--top-k", "3", "--output", "new/out.csv", "--json")
    assert (
        code == 1 and "1 of 6 images could not be read (first: photos é/2/broken.jpg: damag" in err
    )
    said = json.loads(out)
    assert said["images"] == 6 and sum(said["classes"].values()) == 5
    assert said["bad_images"] == {"damaged": 1} and said["prior"] == "none"
    found = rows(Path("new/out.csv").read_text("utf-8"))
    assert [row["path"] for row in found] == [f"photos é/{name}" for name in ORDER]
    assert list(found[0])[:8] == [
        *("path", "member", "status", "class"),
        *("class_id", "probability", "margin", "entropy"),
    ]
    assert list(found[0])[8:] == ["top1", "top2", "top3", "p1", "p2", "p3"]
    model = load_model(run)
    for name, row in zip(ORDER, found, strict=True):
        if name == "2/broken.jpg":
            assert row["status"].startswith("damaged: ") and not any(list(row.values())[3:])
            continue
        (one,) = model.predict(photos / name)
        p = np.sort(one.probabilities)[::-1]
        assert row["status"] == "ok" and row["class"] == row["top1"] == one.label
        assert int(row["class_id"]) == one.class_id
        np.testing.assert_allclose([float(row[f"p{i + 1}"]) for i in range(3)], p[:3], rtol=1e-5)
        assert float(row["margin"]) == pytest.approx(p[0] - p[1], rel=1e-3)
        assert float(row["entropy"]) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)


def test_the_logits_are_those_of_evaluation_bit_for_bit(
    config: Config, command: Callable[..., tuple[int, str, str]], run: str, tmp_path: Path
) -> None:
    dataset = load_dataset(config.data)
    test = make_split(config.data, dataset, config.seed).test
    images, labels = dataset.test_part
    pixels = select(images, test)[0 : len(test)]
    for i, image in enumerate(pixels):
        save(tmp_path / "test" / f"{i:03}.png", Image.fromarray(image))
    code, _, _ = command(
        "test", "--output", "out.parquet", "--logits", "out.npy", "--batch-size", "64"
    )
    assert code == 0
    model, seen = load_model(run, "cpu"), list[torch.Tensor]()
    model.module.register_forward_hook(lambda *a: seen.append(a[2].clone()))
    found = evaluate(
        model.module,
        pixels,
        labels[test],
        mean=model.file.mean,
        std=model.file.std,
        num_classes=10,
        device="cpu",
        batch_size=64,
    )
    logits = np.load("out.npy")
    np.testing.assert_array_equal(logits, torch.cat(seen).numpy())
    assert found.top1 == pytest.approx(100 * np.mean(logits.argmax(1) == labels[test]))


def test_every_source_gives_the_same_answers(
    command: Callable[..., tuple[int, str, str]], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in ORDER if name not in ("2/broken.jpg", "4.png")]
    write_tar(photos.parent / "s.tar", [(name, (photos / name).read_bytes()) for name in names])
    listed = [Row(str(photos / name), "", "unlabeled") for name in names]
    write_manifest(make_manifest(photos.parent, listed), photos.parent / "list.csv")
    files = [f"photos é/{name}" for name in names]
    given = io.BytesIO("\0".join(files).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
    found = []
    for source in (files, ["s.tar"], ["list.csv"], ["-"]):
        code, out, _ = command(*source)
        assert code == 0
        found.append([{**row, "path": "", "member": ""} for row in rows(out)])
        shown = [row["member"] or row["path"].removeprefix("photos é/") for row in rows(out)]
        assert shown == names
    assert found[0] == found[1] == found[2] == found[3]
    _, out, _ = command(*files, "--base", "photos é")
    assert [row["path"] for row in rows(out)] == names


def test_a_file_twice_has_a_row_each_time(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = command("photos é/3.jpg", "photos é", "--on-bad-image", "skip")
    assert code == 0 and len(rows(out)) == 7
    assert "note: 1 image(s) were named before; they have a row each time" in err
    assert rows(out)[0] == rows(out)[5]
    assert command("photos é/3.jpg", "--quiet")[2] == ""


def test_a_prior(command: Callable[..., tuple[int, str, str]]) -> None:
    shares = {str(k): float(k == 3) for k in range(10)}
    Path("p.json").write_text(json.dumps(shares))
    lines = ["share,class", *(f"{share},{name}" for name, share in shares.items())]
    Path("p.csv").write_text("\n".join(lines))
    outs = [command("photos é/3.jpg", "--prior", name)[1] for name in ("p.json", "p.csv")]
    assert outs[0] == outs[1]
    assert rows(outs[0])[0]["class"] == "3" and rows(outs[0])[0]["probability"] == "1.0"
    for name in ("uniform", "labeled", "estimated"):
        assert command("photos é/3.jpg", "--prior", name)[0] == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({str(k): 1 for k in range(9)}, "it lacks, or has besides, '9'"),
        ({str(k): 1 for k in range(11)}, "it lacks, or has besides, '10'"),
        ({str(k): 0 for k in range(10)}, "not all 0"),
        ({str(k): k - 1 for k in range(10)}, "numbers from 0 on, not all 0: '0'"),
        ({**{str(k): 1 for k in range(9)}, "9": "many"}, "cannot be read as a prior"),
        ([1] * 10, "cannot be read as a prior"),
        ("{", "cannot be read as a prior"),
        (None, "none of none, uniform, labeled, estimated, and no file"),
        ("class;share\n0;1\n", "does not name the columns class and share"),
    ],
)
def test_a_prior_that_is_none(
    command: Callable[..., tuple[int, str, str]], content: Any, said: str
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    path = Path("p.csv" if text.startswith("class") else "p.json")
    if content is not None:
        path.write_text(text)
    code, out, err = command("photos é", "--prior", str(path), "--output", "out.csv")
    assert code == 2 and not out and said in err and len(err.splitlines()) == 1
    assert not Path("out.csv.parts").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["photos é", "--output", "out.txt"], 2, "ending must be one of"),
        (["photos é", "--logits", "a.npy"], 2, "--logits needs --output"),
        (["photos é", "--resume"], 2, "--resume needs --output"),
        (["photos é", "--output", "a.csv", "--logits", "a.csv"], 2, "are the same file"),
        (["photos é", "--top-k", "0"], 2, "above 0"),
        (["nowhere"], 1, "nowhere: does not exist"),
        (["photos é/2", "--output", "photos é"], 2, "ending must be"),
        (["empty"], 1, "hold no image"),
        (["empty", "--output", "a.csv"], 1, "hold no image"),
    ],
)
def test_what_cannot_be_done(
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    Path("empty").mkdir()
    before = sorted(os.listdir())
    found, _, err = command(*arguments)
    assert found == code and said in err and len(err.splitlines()) == 1
    assert sorted(os.listdir()) == before


def test_a_model_that_is_cut_short(
    run: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, "copy")
    weights = Path("copy/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])
    assert predict.main(["copy", "photos é", "--output", "out.csv"]) == 1
    assert "model.safetensors: its sha256 is not" in capsys.readouterr().err


def test_finished_output_is_not_replaced_unasked(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    arguments = ["photos é/3.jpg", "--output", "out.csv"]
    assert command(*arguments)[0] == 0
    Path("out.csv").write_text("mine")
    for more in ([], ["--resume"]):
        code, _, err = command(*arguments, *more)
        assert code == 1 and "out.csv: exists already" in err
    assert Path("out.csv").read_text() == "mine"
    assert command(*arguments, "--overwrite")[0] == 0
    assert len(rows(Path("out.csv").read_text())) == 1


def _with_input(pipe: str, arguments: list[str]) -> None:
    """In a process: the command, its standard input a named pipe."""
    os.dup2(os.open(pipe, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    processes.script(COMMAND, ["predict", *arguments])


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGKILL, "parquet"), (signal.SIGINT, "csv")]
)
def test_a_stopped_run_goes_on_to_the_same_bytes(
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    photos: Path,
    run: str,
    number: signal.Signals,
    ending: str,
) -> None:
    folder = photos.parent
    for i in range(30):
        save(folder / "many" / f"{i:02}.png", picture(i))
    (folder / "many" / "07.png").write_bytes(b"no")
    names = "".join(f"many/{i:02}.png\n" for i in range(30))

    def arguments(output: str) -> list[str]:
        files = ["--output", f"{output}.{ending}", "--logits", f"{output}.npy"]
        return ["-", *files, "--batch-size", "4", "--threads", "1"]

    def again(output: str, *more: str, given: str = names) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        return command(*arguments(output), *more)

    os.mkfifo(folder / "names")
    process = processes.start(
        _with_input,
        str(folder / "names"),
        [run, *arguments("out")],
        output=folder / "said",
        folder=folder,
    )
    parts = folder / f"out.{ending}.parts"
    with open(folder / "names", "w") as pipe:
        pipe.write(names[: 25 * 12])
        pipe.flush()
        deadline = time.monotonic() + PATIENCE
        while not (parts / "2.json").exists():
            assert process.exitcode is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(PATIENCE)
    if number == signal.SIGINT:
        assert process.exitcode == 130
        said = (folder / "said.err").read_text().splitlines()
        assert len(said) == 1 and said[0].startswith("interrupted; ")
        assert said[0].endswith(f"images are in out.{ending}.parts, --resume goes on")
    assert not Path(f"out.{ending}").exists() and not Path("out.npy").exists()

    assert again("out")[0] == 1  # not without --resume
    code, _, err = again("out", "--resume", "--prior", "uniform")
    assert code == 2 and 'another prior ("none" then, "uniform" now)' in err
    code, _, err = again("out", "--resume", given=names.replace("many/02", "many/03"))
    assert code == 2 and "are not those of the run that stopped" in err
    code, _, err = again("out", "--resume")
    assert code == 1 and "resumed after " in err and "1 of 30 images could not be read" in err
    assert again("whole")[0] == 1
    for name in (f".{ending}", ".npy"):
        assert Path(f"out{name}").read_bytes() == Path(f"whole{name}").read_bytes()
    assert not list(folder.glob("out*.part*"))
    logits = np.load("out.npy")
    assert logits.shape == (30, 10) and np.isnan(logits).any(1).nonzero()[0].tolist() == [7]


def test_a_full_disk_keeps_what_is_written(
    photos: Path, run: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    for i in range(12):
        save(photos.parent / "many" / f"{i:02}.png", picture(i))
    arguments = ["many", "--output", "out.csv", "--batch-size", "2", "--threads", "1"]
    done = processes.run(
        processes.with_small_files,
        1500,
        processes.script,
        COMMAND,
        ["predict", run, *arguments],
        folder=photos.parent,
    )
    assert done.returncode == 2 and "cannot be written" in done.stderr
    assert "--resume goes on" in done.stderr and len(done.stderr.splitlines()) == 1
    assert command(*arguments, "--resume")[0] == 0
    assert command(*arguments[:2], "whole.csv", *arguments[3:])[0] == 0
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_a_reader_that_goes_away_is_one_line(photos: Path, run: str) -> None:
    command = f"{sys.executable} {COMMAND} predict {run} - --batch-size 1"
    done = subprocess.run(
        ["bash", "-c", f"yes 'photos é/3.jpg' | {command} | head -1; exit ${{PIPESTATUS[1]}}"],
        cwd=photos.parent,
        env=processes.clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1 and done.stdout.startswith("path,member,status")
    assert len(done.stderr.splitlines()) == 1 and "nobody reads the output" in done.stderr
