"""The Python of docs/answers.md, with a stand-in for cleanlab; that of docs/gpu.md."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from simpro_fast import load_model
from simpro_fast.cli.entry import main
from tests.answers.trained import train
from tests.conftest import ROOT
from tests.data.image_folders import tidy
from tests.data.tar_shards import as_shards
from tests.docs.pages import BLOCK

NAMES = ("007", "NA", unicodedata.normalize("NFD", "é"))
NUMBERS = ("3", "10", "2")


def snippet(package: str, name: str = "answers.md") -> str:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    (found,) = (code for kind, code in BLOCK.findall(page) if kind == "python" and package in code)
    return str(found)


def run(code: str, **modules: ModuleType) -> dict[str, Any]:
    """Run the code with these modules; returns its names."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name.replace("__", "."), module)
        exec(compile(code, "<page>", "exec"), names)
    return names


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture(scope="module", params=["nested folders", "shards"])
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos/`, a run on it, and what `predict` says of its labeled images."""
    folder = tmp_path_factory.mktemp("page")
    root, shards = tidy(folder / "photos"), request.param == "shards"
    for name, other in zip(("cats", "dogs", "owls"), NUMBERS if shards else NAMES, strict=True):
        place = (root / "labeled" / name).rename(root / "labeled" / other)
        if not shards:
            (place / "deeper").mkdir()
            (place / "0.jpg").rename(place / "deeper" / "0.jpg")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        labeled = f"{as_shards(root, root)}/labeled-*.tar" if shards else str(root / "labeled")
        sources = [f"--labeled={labeled}", f"--unlabeled={root / 'unlabeled'}"]
        assert main(["prepare", *sources, "--output", "photos/prepared"]) == 0
        data = {"name": "images", "manifest": "photos/prepared/manifest.csv", "image_size": 16}
        train(folder, name="mine", data={**data, "batch_size": 4, "mu": 2})
        files = ["--output", "labeled.csv", "--logits", "labeled.npy", "--quiet"]
        assert main(["predict", "runs/mine/seed1", labeled, *files]) == 0
    return folder


def test_wrong_labels_by_cleanlab(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos)

    def find_label_issues(labels: Any, pred_probs: Any, *, return_indices_ranked_by: str) -> Any:
        assert labels.dtype == np.int64 and pred_probs.shape == (len(labels), 3)
        np.testing.assert_allclose(pred_probs.sum(1), 1, rtol=1e-5)
        return np.argsort(pred_probs[range(len(labels)), labels])

    filters = module("cleanlab.filter", find_label_issues=find_label_issues)
    found = run(snippet("cleanlab"), cleanlab=module("cleanlab"), cleanlab__filter=filters)
    names = load_model("runs/mine/seed1").class_names
    assert len(found["labels"]) == len(found["images"]) == len(found["worst_first"]) == 12
    counts = dict(zip(NUMBERS if "10" in names else NAMES, (5, 4, 3), strict=True))
    by_name = {unicodedata.normalize("NFC", name): count for name, count in counts.items()}
    assert {names[k]: n for k, n in enumerate(np.bincount(found["labels"]))} == by_name
    for image, k in zip(found["images"], found["labels"], strict=True):
        if not image["member"]:
            assert names[k] in unicodedata.normalize("NFC", image["path"]).split("/")


def test_operations_of_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted as docs/gpu.md does, they are what it says."""
    run(snippet("flop_counter", "gpu.md"))
    counted = capsys.readouterr().out.strip()
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"here {counted} billion for WRN-28-2" in page
