"""No file that is read can run code: every reader is handed a pickle that would leave a marker."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simpro_fast.answers.report.runs import load_run
from simpro_fast.config import Config, load_config, parse_config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.image_list import MEAN
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files.manifest import make_manifest
from simpro_fast.data.files.packed import open_packed
from simpro_fast.data.splits.build import make_split
from simpro_fast.models.pretrained import load_pretrained
from simpro_fast.run.checkpoint import find_checkpoint
from simpro_fast.utils.errors import UserError
from tests.conftest import ROOT, TINY
from tests.data.cifar_format import cifar10_members, write_folder
from tests.data.stl10_format import stl10_members, write_stl10


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _torch_file(path: Path, trap: Trap) -> Path:
    """As torch.save writes it: checksums and container are sound, only the content is not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": 1, "step": 4, "model": trap}, path)
    return path


def _data(**keys: Any) -> Config:
    return parse_config({**TINY, "data": {**TINY["data"], "test_per_class": None, **keys}})


def checkpoint_by_path(folder: Path, trap: Trap) -> Any:
    return find_checkpoint(str(_torch_file(folder / "step_000000004.pt", trap)), folder)


def checkpoint_bare_pickle(folder: Path, trap: Trap) -> Any:
    _write(folder / "step_000000004.pt", pickle.dumps(trap))
    return find_checkpoint("auto", folder)


def weights_of_torch(folder: Path, trap: Trap) -> Any:
    return load_pretrained(torch.nn.Linear(2, 2), _torch_file(folder / "weights.pt", trap))


def weights_in_old_format(folder: Path, trap: Trap) -> Any:
    path = folder / "weights.pth"
    torch.save({"model": trap}, path, _use_new_zipfile_serialization=False)
    return load_pretrained(torch.nn.Linear(2, 2), path)


def exported_model(folder: Path, trap: Trap) -> Any:
    path = _write(folder / "model.safetensors", pickle.dumps(trap))
    return load_pretrained(torch.nn.Linear(2, 2), path)


def cifar_batch(folder: Path, trap: Trap) -> Any:
    members = {**cifar10_members(), "data_batch_1": pickle.dumps({"data": trap}, protocol=2)}
    write_folder(folder, "cifar-10-batches-py", members)
    return load_dataset(_data(name="cifar10", root=str(folder)).data)


def small_imagenet_batch(folder: Path, trap: Trap) -> Any:
    for name in [*(f"train_data_batch_{n}" for n in range(1, 11)), "val_data"]:
        _write(folder / name, pickle.dumps({"data": trap, "labels": [1], "mean": trap}))
    config = _data(name="small_imagenet_1k", root=str(folder), image_size=32)
    return load_dataset(config.data)


def split_of_objects(folder: Path, trap: Trap) -> Any:
    objects = np.array([trap], dtype=object)
    np.savez(folder / "split.npz", labeled=objects, unlabeled=objects, test=objects)
    config = _data(split_file=str(folder / "split.npz"))
    return make_split(config.data, load_dataset(config.data), 1)


def packed_objects(folder: Path, trap: Trap) -> Any:
    np.save(folder / "packed.npy", np.array([trap], dtype=object), allow_pickle=True)
    _write(folder / "packed.json", b"{}")
    return open_packed(folder / "packed.npy", make_manifest(folder, []), DataConfig(), MEAN)


def configuration_file(folder: Path, trap: Trap) -> Any:
    text = f"name: !!python/object/apply:os.mkdir ['{trap.marker}']\n"
    return load_config(_write(folder / "bad.yaml", text.encode()))


def report_of_a_run(folder: Path, trap: Trap) -> Any:
    _write(folder / "summary.json", pickle.dumps(trap, protocol=0))
    return load_run(folder)


PLACES: list[Callable[[Path, Trap], Any]] = [
    *(checkpoint_by_path, checkpoint_bare_pickle),
    *(weights_of_torch, weights_in_old_format, exported_model),
    *(cifar_batch, small_imagenet_batch, split_of_objects, packed_objects),
    *(configuration_file, report_of_a_run),
]


@pytest.mark.parametrize("read", PLACES, ids=lambda read: read.__name__)
def test_refused_in_one_line(read: Callable[[Path, Trap], Any], tmp_path: Path) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "files"
    folder.mkdir()
    with pytest.raises(UserError) as caught:
        read(folder, Trap(marker))
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value), "torch's advice is to run the code"
    assert not marker.exists(), "the file ran code"


def test_resized_stl10_is_made_again_without_unpickling(tmp_path: Path) -> None:
    """The one file that is not an error when it is bad, since it can be made again."""
    folder = write_stl10(tmp_path, stl10_members())
    config = _data(name="stl10", root=str(folder), cache_dir=str(tmp_path / "cache"), image_size=32)
    good = load_dataset(config.data)
    (kept,) = (tmp_path / "cache").glob("*.npz")
    marker = tmp_path / "marker"
    np.savez(kept, train_images=np.array([Trap(marker)], dtype=object))
    again = load_dataset(config.data)
    assert np.array_equal(np.asarray(again.images), np.asarray(good.images))
    assert not marker.exists()


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "pickle")))
    torch.load(_torch_file(tmp_path / "x.pt", Trap(tmp_path / "torch")), weights_only=False)
    assert (tmp_path / "pickle").exists() and (tmp_path / "torch").exists()


# What unpickles, or evaluates text, unless the keyword says otherwise.
SAFE_ONLY_WITH = {
    ("torch", "load"): ("weights_only", True),
    ("np", "load"): ("allow_pickle", False),
    ("yaml", "load"): ("Loader", "_Loader"),
}
NEVER = {
    *(("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("marshal", "loads")),
    *(("yaml", "unsafe_load"), ("yaml", "full_load"), ("joblib", "load"), ("pd", "read_pickle")),
    *(("dist", name) for name in ("all_gather_object", "gather_object", "scatter_object_list")),
    *(("dist", name) for name in ("broadcast_object_list", "send_object_list")),
    *(("dist", "recv_object_list"), ("builtins", "eval"), ("builtins", "exec")),
}


def _calls(path: Path) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """(owner, function) and the constant or named keywords of every call in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            name = (function.value.id, function.attr)
        elif isinstance(function, ast.Name):
            name = ("builtins", function.id)
        else:
            continue
        values = {k.arg or "": getattr(k.value, "value", None) for k in node.keywords}
        names = {k.arg or "": k.value.id for k in node.keywords if isinstance(k.value, ast.Name)}
        found.append((name, {**values, **names}))
    return found


def test_no_call_in_the_source_unpickles() -> None:
    """So that a new reader does not slip past the list above."""
    seen = set()
    for package in ("simpro_fast", "kernels", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, keywords in _calls(path):
                assert name not in NEVER, f"{path}: {'.'.join(name)}"
                if name in SAFE_ONLY_WITH:
                    keyword, value = SAFE_ONLY_WITH[name]
                    assert keywords.get(keyword) == value, f"{path}: {'.'.join(name)}"
                    seen.add(name)
    assert seen == set(SAFE_ONLY_WITH)
