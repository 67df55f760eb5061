"""`simpro-fast prepare`: what it finds, refuses, writes and remembers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from simpro_fast.cli import prepare
from simpro_fast.config import load_config
from simpro_fast.config.methods import METHODS
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files import check
from simpro_fast.data.files.decode import Facts, check_file
from simpro_fast.data.files.manifest import read_manifest
from simpro_fast.data.files.packed import is_packed, pack
from simpro_fast.utils.errors import UserError
from tests import processes
from tests.conftest import COMMAND
from tests.data.image_folders import cut, picture, save, tidy
from tests.data.tar_shards import as_shards, write_tar

BAD = ("cats/trunc.jpg", "dogs/empty.jpg", "owls/note.jpg")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tidy(tmp_path / "data")


def damage(root: Path) -> None:
    cut(root / "labeled" / BAD[0], root / "labeled/cats/0.jpg")
    (root / "labeled" / BAD[1]).touch()
    (root / "labeled" / BAD[2]).write_text("a note")


def run(root: Path, *arguments: str) -> int:
    folders = ["--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]
    return prepare.main(
        [*folders, "--val", f"{root}/val", "--output", f"{root}/out", "--threads=2", *arguments]
    )


def problems(root: Path) -> dict[str, str]:
    report = json.loads((root / "out/report.json").read_text())
    return {row["path"].removeprefix(f"{root}/"): row["reason"] for row in report["problems"]}


def test_tidy_set(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root) == 0
    assert "3 classes, 12 labeled, 24 unlabeled, 6 val images, 0 ignored" in capsys.readouterr().out
    manifest = read_manifest(root / "out/manifest.csv")
    assert len(manifest.rows) == 42
    for row in manifest.rows:
        assert row.status == "ok" and Path(row.path).stat().st_size == row.bytes
        with Image.open(row.path) as image:
            assert image.size == (row.width, row.height)


def test_damaged_files_are_listed_and_skipped_on_request(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(root)
    assert run(root) == 1
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and "3 of 45 files" in printed.err
    assert set(problems(root)) == {f"labeled/{name}" for name in BAD}
    for name in BAD:
        assert f"{root}/labeled/{name}: damaged: " in printed.out
    assert not (root / "out/manifest.csv").exists()
    assert run(root, "--on-bad-image", "skip") == 0
    assert "3 skipped" in capsys.readouterr().out
    manifest = read_manifest(root / "out/manifest.csv")
    assert len(manifest.rows) == 45 and len(manifest.usable().rows) == 42


def test_large_pictures_can_be_allowed(root: Path) -> None:
    """An earlier refusal is not remembered, and neither is an earlier permission."""
    save(root / "unlabeled/large.png", Image.new("RGB", (1100, 1000)))
    for limit, code in (("1", 1), ("2", 0), ("1", 1)):
        assert run(root, f"--max-megapixels={limit}") == code
        if code:
            (reason,) = problems(root).values()
            assert "more than 1 million pixels (1100 x 1000)" in reason
    manifest = root / "out/manifest.csv"
    assert any(row.width == 1100 for row in read_manifest(manifest).usable().rows)


def test_duplicates(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(root / "labeled/cats/0.jpg", root / "unlabeled/again.jpg")
    shutil.copy(root / "val/dogs/0.jpg", root / "unlabeled/leak.jpg")
    shutil.copy(root / "val/dogs/1.jpg", root / "labeled/dogs/leak.jpg")
    shutil.copy(root / "labeled/owls/0.jpg", root / "labeled/dogs/owl.jpg")
    shutil.copy(root / "unlabeled/000.jpg", root / "unlabeled/twice.jpg")
    assert run(root) == 1
    found = problems(root)
    assert found["unlabeled/again.jpg"].endswith("also labeled as " + f"{root}/labeled/cats/0.jpg")
    assert "leaks the val image" in found["unlabeled/leak.jpg"]
    assert "leaks the val image" in found["labeled/dogs/leak.jpg"]
    assert "the label 'owls'" in found["labeled/dogs/owl.jpg"]
    assert "the label 'dogs'" in found["labeled/owls/0.jpg"]
    assert len(found) == 5
    assert "1 images occur again in their own set" in capsys.readouterr().out


def test_second_run_decodes_nothing_and_a_changed_file_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []

    def look(path: Path, *settings: Any) -> Facts:
        looked_at.append(path.name)
        return check_file(path, *settings)

    monkeypatch.setattr(check, "check_file", look)
    assert run(root, "--pack", "16") == 0
    assert len(looked_at) == 42
    written = {p.name: p.read_bytes() for p in (root / "out").iterdir()}
    inode = (root / "out/packed_16.npy").stat().st_ino
    looked_at.clear()
    assert run(root, "--pack", "16") == 0
    assert not looked_at
    assert {p.name: p.read_bytes() for p in (root / "out").iterdir()} == written
    assert (root / "out/packed_16.npy").stat().st_ino == inode
    save(root / "unlabeled/003.jpg", picture(777, 50, 50))
    (root / "unlabeled/004.jpg").unlink()
    assert run(root, "--pack", "16") == 0
    assert looked_at == ["003.jpg"]
    assert len(np.load(root / "out/packed_16.npy")) == 41
    (root / "out/.prepare_cache.csv").write_text("rubbish")
    assert run(root) == 0
    assert len(looked_at) == 1 + 41


def test_packed_pictures_are_centred_squares(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    save(root / "unlabeled/turned.jpg", picture(55, 60, 40), exif=exif)
    assert run(root, "--pack", "24") == 0
    packed = np.load(root / "out/packed_24.npy")
    manifest = read_manifest(root / "out/manifest.csv")
    index = json.loads((root / "out/packed_24.json").read_text())
    assert index == {
        "manifest_fingerprint": manifest.fingerprint(),
        "images": 43,
        "size": 24,
        "fit": "crop",
        "interpolation": "bilinear",
        "fill": [0, 0, 0],
    }
    for row, pixels in zip(manifest.rows, packed, strict=True):
        with Image.open(row.path) as image:
            image = image.convert("RGB")
            if "turned" in row.path:
                image = image.transpose(Image.Transpose.ROTATE_270)
                assert image.size == (40, 60)
            w, h = image.size
            s = min(w, h)
            box = ((w - s) / 2, (h - s) / 2, (w + s) / 2, (h + s) / 2)
            expected = np.asarray(image.resize((24, 24), Image.Resampling.BILINEAR, box=box))
        assert np.array_equal(pixels, expected)


def test_packed_by_a_configuration(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its array is what training from the files with the same configuration sees."""
    own = root / "own.yaml"
    assert run(root, "--pack=16", f"--init-config={own}") == 0
    changes = ["data.fit=pad", "data.interpolation=bicubic"]
    again = ["--config", str(own), f"--output={root}/out"]
    again += ["--pack=16", f"--init-config={root}/pad.yaml"]
    assert prepare.main([*again, *changes]) == 0
    assert "0 files decoded" in capsys.readouterr().out
    data = load_config(root / "pad.yaml").data
    assert (data.fit, data.interpolation) == ("pad", "bicubic")
    packed = load_dataset(data).images
    assert np.array_equal(packed, load_dataset(data.model_copy(update={"packed": None})).images[:])
    with pytest.raises(UserError, match=r"packed with fit pad"):
        load_dataset(load_config(own).data)


def test_what_the_largest_centred_square_leaves_out_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in root.glob("*/*/*"):
        with Image.open(path) as image:
            image.resize((40, 40)).save(path)
    assert run(root) == 0
    assert "data.fit=pad" not in capsys.readouterr().out, "nearly squares"
    for number in range(42):
        save(root / f"unlabeled/film{number}.jpg", picture(number, 64, 36))
    assert run(root, f"--init-config={root}/own.yaml") == 0
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "data.fit=pad" in s]
    assert re.search(r"1:1 50%, 16:9 50%.* so 2\d% of the area is not", line)
    arguments = ["--config", f"{root}/own.yaml", f"--output={root}/out", "data.fit=pad"]
    assert prepare.main(arguments) == 0
    assert "data.fit=pad" not in capsys.readouterr().out


def test_suggested_configuration_loads(root: Path) -> None:
    assert run(root, "--pack", "16", "--init-config", f"{root}/own.yaml") == 0
    config = load_config(root / "own.yaml")
    assert config.data.name == "images" and config.data.image_size == 16
    assert config.data.manifest == root / "out/manifest.csv"
    assert config.data.packed == root / "out/packed_16.npy"
    assert (config.data.batch_size, config.data.mu) == (8, 2)
    for method in METHODS:
        assert load_config(root / "own.yaml", [f"method.name={method}"]).method.name == method
    shutil.rmtree(root / "val")
    arguments = ["--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]
    arguments += ["--output", f"{root}/two", "--init-config", f"{root}/two.yaml"]
    assert prepare.main(arguments) == 0
    assert load_config(root / "two.yaml").data.packed is None
    assert "nothing is measured" in (root / "two.yaml").read_text()
    # the written configuration names a data set that can be prepared again
    assert prepare.main(["--config", f"{root}/two.yaml", "--output", f"{root}/two"]) == 0


def test_edited_configuration_is_not_replaced(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = root / "own.yaml"
    own.write_text("mine")
    assert run(root, f"--init-config={own}") == 0
    assert "exists already, and is left as it is" in capsys.readouterr().out
    assert own.read_text() == "mine"
    own.unlink()
    assert run(root, f"--init-config={own}") == 0 and "24 unlabeled" in own.read_text()


def test_configuration_says_what_a_cpu_needs(root: Path) -> None:
    assert run(root, f"--init-config={root}/own.yaml") == 0
    (line,) = re.findall(r"# the command: (.*)", (root / "own.yaml").read_text())
    config = load_config(root / "own.yaml", line.split())
    assert config.model.name == "small_cnn" and config.data.batch_size == 8
    names = [load_config(root / "own.yaml").name, config.name]
    assert run(root, "--pack=16", f"--init-config={root}/packed.yaml") == 0
    (line,) = re.findall(r"# the command: (.*)", (root / "packed.yaml").read_text())
    names += [load_config(root / "packed.yaml", of).name for of in ([], line.split())]
    assert len(set(names)) == 4, "no variant stands in the way of another"
    assert "  flip: true  # false for text, digits, left/right\n" in (root / "own.yaml").read_text()
    assert config.data.flip is True


def test_class_without_a_usable_image(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (root / "labeled/owls").iterdir():
        path.write_bytes(b"x")
    for mode in ("skip", "error"):
        assert run(root, f"--on-bad-image={mode}") == 1
        assert "class 'owls' has no usable labeled image" in capsys.readouterr().err
    assert not (root / "out/manifest.csv").exists()


def test_tar_shards(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted, checked, remembered and packed as files are; problems name shard and member."""
    tars = as_shards(root, root / "tars")
    arguments = [
        f"--labeled={tars}/labeled-{{000..001}}.tar",
        f"--unlabeled={tars}/unlabeled-*.tar",
    ]
    arguments += [f"--val={tars}/val-000.tar", f"--output={root}/out", "--threads=2", "--pack=16"]
    assert run(root, "--pack=16") == 0
    of_files, packed = read_manifest(root / "out/manifest.csv"), np.load(root / "out/packed_16.npy")
    shutil.rmtree(root / "out")
    before = {path: path.stat().st_mtime_ns for path in tars.iterdir()}
    capsys.readouterr()
    assert prepare.main([*arguments, f"--init-config={root}/own.yaml"]) == 0
    said = capsys.readouterr().out
    assert "3 classes, 12 labeled, 24 unlabeled, 6 val images, 0 ignored" in said
    manifest = read_manifest(root / "out/manifest.csv")
    for row, file in zip(manifest.rows, of_files.rows, strict=True):
        for name in ("label", "split", "width", "height", "bytes", "sha256", "status"):
            assert getattr(row, name) == getattr(file, name)
    assert np.array_equal(np.load(root / "out/packed_16.npy"), packed)
    assert {path: path.stat().st_mtime_ns for path in tars.iterdir()} == before
    config = load_config(root / "own.yaml")
    assert load_dataset(config.data).fingerprint() == manifest.fingerprint()
    (shown,) = re.findall(r"fingerprint (\w+) .*a run resumes only", said)
    assert manifest.fingerprint().startswith(shown)
    with monkeypatch.context() as patch:
        patch.setattr(check, "check_file", lambda image, *_: pytest.fail(f"{image} again"))
        assert prepare.main(arguments) == 0
    half = (root / "unlabeled/000.jpg").read_bytes()[:400]
    bad = [("cut.jpg", half), ("note.jpg", b"a note"), ("empty.jpg", b"")]
    copied = ("copied.jpg", (root / "labeled/cats/0.jpg").read_bytes())
    path = write_tar(tars / "unlabeled-100.tar", [*bad, copied])
    capsys.readouterr()
    assert prepare.main(arguments) == 1
    printed = capsys.readouterr()
    assert "4 of 46 files" in printed.err and len(printed.err.splitlines()) == 1
    for name, _ in bad:
        assert f"{path} member {name}: damaged: " in printed.out
    assert f"copied.jpg: duplicate: also labeled as {tars}/labeled-000.tar member cats/0.jpg" in (
        printed.out
    )
    report = json.loads((root / "out/report.json").read_text())
    assert {"path": str(path), "member": "empty.jpg", "reason": "damaged: empty file"} in (
        report["problems"]
    )
    assert prepare.main([*arguments, "--on-bad-image=skip"]) == 0
    assert len(read_manifest(root / "out/manifest.csv").usable().rows) == 42


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--output", "o"], "give --labeled and --unlabeled"),
        (["--labeled", "a", "--output", "o"], "give --labeled and --unlabeled"),
        (["--config", "digits_lt/reversed", "--labeled", "a", "--output", "o"], "exclude"),
        (["--config", "digits_lt/reversd", "--output", "o"], "digits_lt/reversed"),
        (["--config", "digits_lt/reversed", "--output", "o"], "digits needs no preparation"),
        (["--labeled", "a", "--unlabeled", "b", "--output", "o", "--pack", "0"], "'0'"),
        (["--labeled", "a", "--unlabeled", "b"], "--output"),
        (["--output", "o", "--unlabeled", "u", "--labeled", "a.tar", "b.tar"], "quote patterns"),
        (["--new-classes", "--output", "o"], "is for the labels of --add-labels"),
        (["a=1", "--labeled", "a", "--unlabeled", "b", "--output", "o"], "a=1 needs --config"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare.main(arguments) == 2
    error = capsys.readouterr().err
    assert part in error and len(error.splitlines()) == 1


def test_missing_folder_is_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "unlabeled")
    assert run(root) == 1
    assert capsys.readouterr().err == (
        f"error: {root}/unlabeled: cannot be read (No such file or directory); "
        "check the path and its permissions\n"
    )
    assert not (root / "out").exists(), "nothing was written, so nothing is left"


def test_interruption_leaves_no_manifest_and_remembers(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: object, done: int, total: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare.ProgressBar, "__call__", interrupt)
        assert run(root) == 130
    assert {p.name for p in (root / "out").iterdir()} == {".prepare.lock", ".prepare_cache.csv"}
    capsys.readouterr()
    assert run(root) == 0
    assert "32 files decoded, 10 known from before" in capsys.readouterr().out


def test_full_disk_while_packing(root: Path) -> None:
    arguments = ["prepare", "--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]
    arguments += ["--output", f"{root}/out", "--pack", "64"]
    done = processes.run(processes.with_small_files, 60_000, processes.script, COMMAND, arguments)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "packed_64.npy: cannot be written (File too large); free some space" in done.stderr
    left = {p.name for p in (root / "out").iterdir()}
    assert left == {".prepare.lock", ".prepare_cache.csv", "manifest.csv", "report.json"}


def test_failed_packing_leaves_the_earlier_array_whole(root: Path) -> None:
    assert run(root, "--pack=16") == 0
    earlier = read_manifest(root / "out/manifest.csv")
    before = {path.name: path.read_bytes() for path in (root / "out").glob("packed*")}
    save(root / "unlabeled/003.jpg", picture(777))
    assert run(root) == 0
    (root / "unlabeled/004.jpg").unlink()
    now = read_manifest(root / "out/manifest.csv")
    with pytest.raises(UserError, match=r"004\.jpg"):
        pack(now, root / "out", Square(16), threads=1, progress=lambda done: None)
    assert {path.name: path.read_bytes() for path in (root / "out").glob("*packed*")} == before
    assert is_packed(earlier, root / "out", Square(16))


def _prepare(arguments: list[str]) -> None:
    sys.exit(prepare.main(arguments))


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed to be refused")
def test_files_and_folders_without_permission(open_path: Path) -> None:
    """Each one line with the path and the cure; a file is one of the problems."""
    root = tidy(open_path)
    arguments = ["--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]

    def refused(output: Path, code: int) -> subprocess.CompletedProcess[str]:
        command = (_prepare, [*arguments, "--output", str(output)])
        done = processes.run(processes.as_nobody, *command)
        assert done.returncode == code and len(done.stderr.splitlines()) == 1, done.stderr
        return done

    closed = root / "closed"
    closed.mkdir(mode=0o755)
    assert f"{closed}: cannot be written (Permission denied); check" in refused(closed, 2).stderr
    assert not list(closed.iterdir())
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    (root / "unlabeled/003.jpg").chmod(0o000)
    done = refused(root / "open", 1)
    assert f"{root}/unlabeled/003.jpg: unreadable: Permission denied" in done.stdout
    assert "1 of 36 files cannot be used" in done.stderr
    (root / "labeled/cats").chmod(0o000)
    assert f"{root}/labeled/cats: cannot be read (Permission denied)" in (
        refused(root / "open", 1).stderr
    )


def test_several_processes_at_once(root: Path) -> None:
    """All succeed, and what they wrote is whole."""
    arguments = ["prepare", "--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]
    arguments += ["--val", f"{root}/val", "--output", f"{root}/out", "--pack", "16"]
    started = [
        (processes.start(processes.script, COMMAND, arguments, output=output), output)
        for output in (root / f"said{n}" for n in range(4))
    ]
    done = [processes.finish(*process) for process in started]
    assert [process.returncode for process in done] == [0] * 4, done
    assert sum("42 files decoded, 0 known" in process.stdout for process in done) == 1
    assert sum("0 files decoded, 42 known" in process.stdout for process in done) == 3
    assert len(np.load(root / "out/packed_16.npy")) == len(
        read_manifest(root / "out/manifest.csv").rows
    )
    assert {p.name for p in (root / "out").glob(".*")} == {".prepare.lock", ".prepare_cache.csv"}
