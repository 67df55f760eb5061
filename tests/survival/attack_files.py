"""Attacks by files that are named to the program: manifests, archives, special files, names."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import resource
import shutil
import signal
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.PngImagePlugin import PngInfo

from simpro_fast.answers.report import print_summary, write_report
from simpro_fast.answers.report.groups import group_runs
from simpro_fast.answers.report.runs import load_run
from simpro_fast.config import load_config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.fashion_mnist import read_idx
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files.decode import OK, check_file, read_header
from simpro_fast.data.files.manifest import read_manifest, write_manifest
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.listed import listed_split
from simpro_fast.models.pretrained import load_pretrained
from simpro_fast.run.checkpoint import find_checkpoint
from simpro_fast.utils.logs import log_to_terminal
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
def _no_waiting(seconds: int = 20) -> Iterator[None]:
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


def _special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)  # its address may not be long
            made.bind(path.name)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@trial("pipes, sockets, devices")
def only_regular_files_are_opened(folder: Path) -> Iterator[Attempt]:
    root = tidy(folder / "data")
    manifest = make_manifest(root, "--pack=16")
    here = Path.cwd()
    settings = {"name": "images", "image_size": 16}
    listed = DataConfig(**settings, manifest=manifest)
    packed = DataConfig(**settings, manifest=manifest, packed=root / "out/packed_16.npy")
    by_hand = folder / "by_hand.csv"
    by_hand.write_text(
        "path,label\ndata/labeled/cats/0.jpg,cats\ndata/labeled/dogs/0.jpg,dogs\n"
        "data/unlabeled/000.jpg,\n"
    )
    hand_made = DataConfig(**settings, manifest=by_hand)
    lists = folder / "lists.npz"
    digits = DataConfig(name="digits", split_file=lists)
    parquet = DataConfig(**settings, manifest=folder / "list.parquet")
    network = torch.nn.Linear(2, 2)
    step = folder / "checkpoints/step_000000004.pt"
    step.parent.mkdir()
    shard = as_shards(root, folder / "tars", 100) / "unlabeled-000.tar"
    tars = [folder / f"tars/{part}-000.tar" for part in ("labeled", "unlabeled")]
    listed_shards, _ = scan_folders(tars[0], [tars[1]])
    write_manifest(listed_shards, folder / "tars/list.csv")
    in_shards = DataConfig(**settings, manifest=folder / "tars/list.csv")
    readers: dict[str, tuple[Path, Callable[[], Any]]] = {
        "manifest": (by_hand, lambda: read_manifest(by_hand)),
        "Parquet manifest": (folder / "list.parquet", lambda: load_own_images(parquet)),
        "picture of a list": (root / "unlabeled/000.jpg", lambda: load_own_images(hand_made)),
        "prepared picture": (root / "unlabeled/000.jpg", lambda: load_own_images(listed)),
        "shard of a list": (shard, lambda: load_own_images(in_shards)),
        "packed array": (root / "out/packed_16.npy", lambda: load_own_images(packed)),
        "index of it": (root / "out/packed_16.json", lambda: load_own_images(packed)),
        "split file": (lists, lambda: make_split(digits, load_dataset(digits), 1)),
        "weights": (folder / "w.pt", lambda: load_pretrained(network, folder / "w.pt")),
        "checkpoint": (step, lambda: find_checkpoint("auto", step.parent)),
        "configuration": (folder / "c.yaml", lambda: load_config(folder / "c.yaml")),
        "CIFAR archive": (
            folder / "cifar-10-python.tar.gz",
            lambda: load_dataset(DataConfig(name="cifar10", root=folder)),
        ),
        "SVHN file": (
            folder / "train_32x32.mat",
            lambda: load_dataset(DataConfig(name="svhn", root=folder)),
        ),
        "summary of a run": (folder / "summary.json", lambda: load_run(folder)),
    }
    for what, (path, read) in readers.items():
        content = path.read_bytes() if path.exists() else None
        for kind in ("a pipe", "a socket", "a device", "a folder"):
            _special(path, kind)
            with _no_waiting():
                complaint = refused(read)
            yield Attempt(f"{kind} as {what}", complaint)
            path.rmdir() if kind == "a folder" else path.unlink()
        if content is not None:
            path.write_bytes(content)
    for kind in ("a pipe", "a socket", "a device"):
        _special(root / "unlabeled/special.jpg", kind)
        with _no_waiting(60):
            code, said = run_prepare(root)
        yield Attempt(f"{kind} in a folder", None if code == 0 and "ignored" in said else said)
        (root / "unlabeled/special.jpg").unlink()
    os.chdir(here)


def _npz(path: Path, shape: tuple[int, ...], content: bytes, compression: int) -> None:
    header = io.BytesIO()
    described = {"descr": "<i8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in ("labeled", "unlabeled"):
            archive.writestr(f"{name}.npy", header.getvalue() + content)


@trial("headers that lie, bombs")
def memory_is_bounded_by_what_the_file_may_hold(folder: Path) -> Iterator[Attempt]:
    lists = folder / "lists.npz"
    digits = DataConfig(name="digits", split_file=lists)
    dataset = load_dataset(digits)
    for what, shape, content, compression in (
        ("npz header of 2^50", (2**50,), bytes(800), zipfile.ZIP_STORED),
        ("npz header of 2^64", (2**64,), bytes(800), zipfile.ZIP_STORED),
        ("npz header of -1", (-1,), bytes(800), zipfile.ZIP_STORED),
        ("npz of 64 MB of zeros", (2**23,), bytes(2**26), zipfile.ZIP_DEFLATED),
    ):
        _npz(lists, shape, content, compression)
        complaint = refused(lambda: make_split(digits, dataset, 1), "lists.npz")
        yield Attempt(what, complaint)
    idx = folder / "images.gz"
    for what, sides, zeros in (
        ("idx.gz of 2^96", (2**32 - 1,) * 3, 2**20),
        ("idx.gz of 256 MB behind a header of 12", (3, 2, 2), 2**28),
        ("idx.gz with 255 dimensions", (2,) * 255, 2**20),
    ):
        header = struct.pack(f">HBB{len(sides)}I", 0, 8, len(sides), *sides)
        with gzip.open(idx, "wb", compresslevel=1) as file:
            file.write(header)
            for _ in range(zeros >> 20):
                file.write(bytes(1 << 20))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        complaint = refused(lambda: read_idx(idx), "images.gz")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        yield Attempt(what, f"took {grown} MiB" if grown > 100 else complaint)
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
def what_is_logged_and_reported(folder: Path) -> Iterator[Attempt]:
    ours = logging.getLogger("simpro_fast")
    handlers, level = ours.handlers, ours.level
    said = io.StringIO()
    with redirect_stdout(said):
        log_to_terminal(is_main=True)
        ours.info("ignored: %s", _FORGED)
    ours.handlers, ours.level = handlers, level
    yield Attempt("the log", _wrong_lines(said.getvalue()))
    shares, counts = [0.5, 0.3, 0.2], [5, 3, 2]
    summary = {
        **{"name": _FORGED, "seed": 1, "method": "simpro", "steps": 4, "top1": 50.0},
        **{"class_names": [_FORGED, "a$b^$c", "d"], "per_class": [1.0, 2.0, None]},
        **{"pi_u": shares, "pi_u_true": shares},
        **{"labeled_counts": counts, "unlabeled_counts": counts},
    }
    said = io.StringIO()
    print_summary(summary, file=said)
    yield Attempt("the table of a run", _wrong_lines(said.getvalue()))
    row = {"step": 1, "top1": 50.0, "mask_rate": 0.5, "kl_pi_u": 0.1}
    (folder / "metrics.jsonl").write_text(json.dumps(row))
    written = write_report(group_runs([load_run(folder, summary)]), folder / "report")
    yield Attempt("the figures of a run", None if len(written) == 6 else f"only {written}")


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
