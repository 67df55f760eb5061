"""Attacks by files that are named to the program: manifests, archives, special files, names."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL.PngImagePlugin import PngInfo
from torch import nn

from simpro_fast.answers.report import print_summary, write_report
from simpro_fast.answers.report.groups import group_runs
from simpro_fast.answers.report.runs import load_run
from simpro_fast.config import load_config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files.decode import OK, check_file, read_header
from simpro_fast.data.files.manifest import read_manifest, write_manifest
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.splits.listed import listed_split
from simpro_fast.models.pretrained import load_pretrained
from simpro_fast.run.checkpoint import find_checkpoint
from tests.answers.report.made_runs import make_run
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import as_shards
from tests.survival.attack import Attempt, refused, trial, wrong_line
from tests.survival.prepared import make_manifest, run_prepare


@trial("manifests")
def numbers_of_a_manifest(folder: Path) -> Iterator[Attempt]:
    path = folder / "manifest.csv"
    for column in ("width", "height", "bytes", "offset"):
        for value in ("-1", "1" + "0" * 21, "1e3", "nan", "9" * 5000, "2.5", "\u0661", " "):
            path.write_text(f"path,{column}\na.jpg,{value}\n", encoding="utf-8")
            complaint = refused(lambda: read_manifest(path), "line 2", f"{column}=")
            yield Attempt(f"{column} {value[:30]}", complaint)
    path.write_text("path,width\na.jpg,24\n")
    yield Attempt("width alone", refused(lambda: read_manifest(path), "line 2", "go together"))
    path.write_text("path,label\na\0.jpg,cats\n")
    yield Attempt("NUL in a path", refused(lambda: read_manifest(path), "line 2", "NUL"))
    path.write_text("path,label\na.jpg,ca\0ts\n")
    yield Attempt("NUL in a label", refused(lambda: read_manifest(path), "line 2", "NUL"))


@trial("test images that leak")
def no_image_is_trained_on_and_tested_on(folder: Path) -> Iterator[Attempt]:
    root = tidy(folder / "data", labeled=(6, 5, 5))
    settings = {"name": "images", "image_size": 16}
    folders = {"labeled": root / "labeled", "unlabeled": root / "unlabeled"}
    (folder / "link").symlink_to(root / "labeled")
    for what in ("labeled", "../link"):
        data = DataConfig(**settings, **folders, val=root / what)
        complaint = refused(lambda data=data: load_own_images(data), "val image", "labeled ones")
        yield Attempt(f"val is {what}", complaint)
    listed = folder / "list.csv"
    names = [f"data/labeled/cats/{i}.jpg,cats" for i in (0, 1)]
    names += [f"data/labeled/dogs/{i}.jpg,dogs" for i in (0, 1)]
    listed.write_text("\n".join(["path,label,split", *(f"{n},labeled" for n in names)]))
    more = "\ndata/unlabeled/000.jpg,{},unlabeled\ndata/unlabeled/000.jpg,cats,val\n"
    listed.write_text(listed.read_text() + more.format(""))
    data = DataConfig(**settings, manifest=listed)
    complaint = refused(lambda: load_own_images(data), "val image", "unlabeled ones")
    yield Attempt("a list with an unlabeled val image", complaint)
    for name in ("0.jpg", "1.jpg", "3.jpg"):
        for copy in ("again", "once_more"):
            shutil.copy(root / "labeled/cats" / name, root / f"labeled/cats/{copy}_{name}")
    for prepared in (False, True):
        own = {"manifest": make_manifest(root)} if prepared else folders
        data = DataConfig(**settings, **own, holdout_per_class=3)
        dataset = load_own_images(data)
        split = listed_split(data, dataset)
        hashes = [
            hashlib.sha256(Path(row.path).read_bytes()).digest() for row in dataset.manifest.rows
        ]
        test, trained = ({hashes[i] for i in part} for part in (split.test, split.labeled))
        complaint = f"{len(test & trained)} contents in both" if test & trained else None
        if split.test_counts != (3, 3, 3) or len(test) != 9:
            complaint = f"held out: {split.test_counts}"
        yield Attempt(f"copies within a class, prepared: {prepared}", complaint)


@contextmanager
def _no_waiting(seconds: int = 60) -> Iterator[None]:
    """A call that waits for ever becomes an error."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@trial("pipes and devices")
def only_regular_files_are_opened(folder: Path) -> Iterator[Attempt]:
    root = tidy(folder / "data")
    by_hand = folder / "by_hand.csv"
    by_hand.write_text(
        "path,label\ndata/labeled/cats/0.jpg,cats\ndata/labeled/dogs/0.jpg,dogs\n"
        "data/unlabeled/000.jpg,\n"
    )
    tars = as_shards(root, folder / "tars", 100)
    shards = [tars / f"{part}-000.tar" for part in ("labeled", "unlabeled")]
    write_manifest(scan_folders(shards[0], shards[1:])[0], tars / "list.csv")
    lists = {"by hand": by_hand, "prepared": make_manifest(root), "of shards": tars / "list.csv"}
    listed = {
        name: DataConfig(name="images", image_size=16, manifest=path)
        for name, path in lists.items()
    }
    image, step = root / "unlabeled/000.jpg", folder / "step_000000004.pt"
    readers: dict[str, tuple[Path, Callable[[], Any]]] = {
        "manifest": (folder / "x.csv", lambda: read_manifest(folder / "x.csv")),
        "picture of a list": (image, lambda: load_own_images(listed["by hand"])),
        "prepared picture": (image, lambda: load_own_images(listed["prepared"])),
        "shard of a list": (shards[1], lambda: load_own_images(listed["of shards"])),
        "weights": (folder / "w.pt", lambda: load_pretrained(nn.Linear(2, 2), folder / "w.pt")),
        "checkpoint": (step, lambda: find_checkpoint("auto", folder)),
        "summary of a run": (folder / "summary.json", lambda: load_run(folder)),
    }
    for make in (os.mkfifo, _device):
        for what, (path, read) in readers.items():
            content = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            make(path)
            with _no_waiting():
                yield Attempt(f"{make.__name__} as {what}", refused(read))
            path.unlink()
            if content is not None:
                path.write_bytes(content)
        make(root / "unlabeled/special.jpg")
        with _no_waiting():
            code, said = run_prepare(root)
        done = code == 0 and "ignored" in said
        yield Attempt(f"{make.__name__} in a folder", None if done else said)
        (root / "unlabeled/special.jpg").unlink()


@trial("pictures that swell")
def memory_is_bounded(folder: Path) -> Iterator[Attempt]:
    text = PngInfo()
    text.add_text("note", "x" * (2 << 20), zip=True)
    status = check_file(save(folder / "x.png", picture(1), pnginfo=text)).status
    yield Attempt("text of 2 MiB in a PNG", wrong_line(status, "unsupported: PNG with a text"))
    large = folder / "large.png"
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    large.write_bytes(b"\x89PNG\r\n\x1a\n")
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(bytes(9)), b"IEND": b""}
    with large.open("ab") as file:
        for kind, content in chunks.items():
            file.write(struct.pack(">I", len(content)) + kind + content)
            file.write(struct.pack(">I", zlib.crc32(kind + content)))
    status = check_file(large).status
    complaint = wrong_line(status, "unsupported: more than 179 million pixels (30000 x 30000)")
    yield Attempt("PNG of 900 million pixels", complaint)
    status = read_header(large, megapixels=900).status
    yield Attempt("the same where it is allowed", None if status == OK else status)


_FORGED = "cats\nerror: forged\x1b[31m\u202e"


def _wrong_lines(said: str) -> str | None:
    """What a name has done to the lines of a text."""
    for line in said.removesuffix("\n").split("\n"):
        if not line.isprintable() or line.startswith("error: forged"):
            return f"printed {line!r}"
    return None if "forged" in said else "the name is not in it"


@trial("names with control characters")
def folders_and_files(folder: Path) -> Iterator[Attempt]:
    root = tidy(folder / "data")
    (root / "labeled/cats").rename(root / "labeled" / _FORGED)
    for name in ("a\x1b]0;title\x07.jpg", "b\r.jpg", "c\udcff.jpg"):
        (root / "unlabeled" / name).write_bytes(b"no picture")
    code, said = run_prepare(root)
    yield Attempt("prepare", _wrong_lines(said) if code == 1 else f"exit code {code}")
    own = folder / "own.yaml"
    code, said = run_prepare(root, "--on-bad-image=skip", "--pack=16", f"--init-config={own}")
    yield Attempt("prepare that skips", _wrong_lines(said) if code == 0 else f"exit code {code}")
    found = load_own_images(load_config(own).data).class_names
    yield Attempt("the set it has made", None if _FORGED in found else f"has classes {found}")


@trial("names with control characters")
def what_is_reported(folder: Path) -> Iterator[Attempt]:
    run, said = make_run(folder / "run/seed1", class_names=[_FORGED, "a$b^$c", "d"]), io.StringIO()
    print_summary({**load_run(run).summary, "name": _FORGED}, file=said)
    yield Attempt("the table of a run", _wrong_lines(said.getvalue()))
    written = write_report(group_runs([load_run(run)]), folder / "report")
    yield Attempt("the figures of a run", None if len(written) > 5 else f"only {written}")


@trial("names with control characters")
def keys_columns_values(folder: Path) -> Iterator[Attempt]:
    config, listed = folder / "x.yaml", folder / "x.csv"
    config.write_text(json.dumps({_FORGED: 1}))
    yield Attempt("a key of YAML", refused(lambda: load_config(config), "unknown key"))
    config.write_text(json.dumps({"name": "x", "data": {"name": _FORGED}}))
    data = load_config(config).data
    yield Attempt("a value of YAML", refused(lambda: load_dataset(data), "forged"))
    data = DataConfig(name="images", image_size=16, manifest=listed)
    for what, rows in {
        "a column": f'path,"{_FORGED}"\na.jpg,1\n',
        "a split": f'path,split\na.jpg,"{_FORGED}"\n',
        "a path": f'path,label\n"{_FORGED}",a\ny.jpg,b\nz.jpg,\n',
        "a label": f'path,label\nx.jpg,"{_FORGED}"\n',
    }.items():
        listed.write_text(rows)
        complaint = refused(lambda: load_own_images(data), "forged" if what != "a label" else "")
        yield Attempt(f"{what} of a manifest", complaint)
