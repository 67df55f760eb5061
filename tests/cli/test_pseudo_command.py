"""`simpro-fast pseudo`: the training's own rule, and the queue."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet
import pytest
import torch
from scipy.special import softmax

from simpro_fast import SimPro, load_model
from simpro_fast.cli import prepare, pseudo
from simpro_fast.config.schema import Config
from simpro_fast.data.splits.split import load_split
from tests.answers.trained import train
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import as_shards

Command = Callable[..., tuple[int, str, str]]
THRESHOLD = 0.26


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls the verb in this process; returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = pseudo.main([str(word) for word in arguments])
        return code, *capsys.readouterr()

    return call


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8"), newline="")))


def own_images(root: Path, **data: Any) -> Config:
    """A run on the folders below `root`; `data` in place of some of them."""
    folders = {"labeled": root / "labeled", "unlabeled": [root / "unlabeled"], "val": root / "val"}
    keys = {**{k: [*map(str, v)] if isinstance(v, list) else str(v) for k, v in folders.items()}}
    own = {"name": "images", "image_size": 16, "batch_size": 4, "mu": 2, **keys, **data}
    return train(root, data=own)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return train(
        tmp_path_factory.mktemp("digits"),
        method={"threshold": THRESHOLD, "alpha_max": 1.0},
        methods={"simpro": {"tau": 2.0}},
    )


@pytest.fixture(scope="module")
def trained_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data/` with a run on it; the unlabeled ones have six names for one picture."""
    root = tidy(tmp_path_factory.mktemp("own") / "my data é")
    for i in range(5):
        shutil.copy(root / "unlabeled" / "000.jpg", root / "unlabeled" / f"copy {i}.jpg")
    own_images(root)
    return root


@pytest.fixture
def own(trained_own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder and a copy of its run directory."""
    (run,) = trained_own.glob("runs/*/*")
    monkeypatch.chdir(tmp_path)
    return trained_own, Path(shutil.copytree(run, tmp_path / "run"))


def test_the_rule_is_that_of_the_training(digits: Config, command: Command, tmp_path: Path) -> None:
    logits_path = tmp_path / "f.npy"
    out = tmp_path / "p.parquet"
    code, said, _ = command(digits.run_dir, "--output", out, "--logits", logits_path, "--json")
    table, f = pyarrow.parquet.read_table(out), np.load(logits_path).astype(np.float64)
    split, file = load_split(digits.run_dir), load_model(digits.run_dir).file
    assert code == 0 and table["index"].to_pylist() == split.unlabeled.tolist()
    assert len(f) == len(split.unlabeled) and np.isfinite(f).all()
    q = softmax(f + 2.0 * np.log(file.pi_u), axis=1)  # Algorithm 1, the E step
    names = [file.class_names[k] for k in q.argmax(axis=1)]
    assert table["pseudo_class"].to_pylist() == names
    np.testing.assert_allclose(table["pseudo_probability"].to_numpy(), q.max(1), rtol=1e-5)
    kept = table["kept"].to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(kept, q.max(1) >= THRESHOLD)
    assert 0 < kept.sum() < len(kept)
    facts = json.loads(said)
    assert facts["kept"] == kept.sum() == sum(facts["kept_per_class"].values())
    assert facts["threshold"] == THRESHOLD


def test_fixmatch_has_its_own_rule(command: Command, tmp_path: Path) -> None:
    config = train(tmp_path, method={"name": "fixmatch", "threshold": 0.12})
    assert command(config.run_dir, "--logits", tmp_path / "f.npy", "--quiet")[0] == 0
    p = softmax(np.load(tmp_path / "f.npy").astype(np.float64), axis=1)
    found = rows(config.run_dir / "pseudo.csv")
    assert [row["pseudo_class"] for row in found] == [str(k) for k in p.argmax(axis=1)]
    assert [row["kept"] for row in found] == [str(k).lower() for k in p.max(1) >= 0.12]


def test_own_images_and_their_queue(own: tuple[Path, Path], command: Command) -> None:
    root, run = own
    code, out, err = command(run, "--queue", "100", "--batch-size", "7")
    assert code == 0 and "of 100 places are filled; all other images look like" in err
    assert "cats" in out
    found, queue = rows(run / "pseudo.csv"), rows(run / "queue.csv")
    unlabeled = sorted(path.name for path in (root / "unlabeled").iterdir())
    assert [Path(row["path"]).name for row in found] == unlabeled and len(unlabeled) == 29
    assert all((run / row["path"]).resolve().is_file() for row in found + queue)
    assert list(queue[0])[:3] == ["path", "member", "label"]
    assert not any(row["label"] or row["member"] for row in queue)
    names = [Path(row["path"]).name for row in queue]
    # Some of the 24 pictures are of nothing but sky.
    assert 18 <= len(set(names)) == len(names) <= 24
    assert sum(name == "000.jpg" or name.startswith("copy") for name in names) == 1
    again = Path("again")
    arguments = ("--queue", "100", "--batch-size", "7", "--base", root)
    assert command(run, *arguments, "--output", again / "p.csv")[0] == 0
    assert [Path(row["path"]).name for row in rows(again / "queue.csv")] == names
    assert rows(again / "queue.csv")[0]["path"] == f"unlabeled/{names[0]}"
    for measure, sign in (("margin", 1), ("entropy", -1)):
        arguments = ("--queue", "9", "--measure", measure, "--overwrite", "--quiet")
        assert command(run, *arguments)[0] == 0
        chosen = rows(run / "queue.csv")
        for name in {row["predicted"] for row in chosen}:
            own_values = [sign * float(row[measure]) for row in chosen if row["predicted"] == name]
            assert own_values == sorted(own_values)


QUEUES: dict[str, Callable[[str], bytes]] = {
    "plain": lambda text: text.encode(),
    "with a mark": lambda text: text.encode("utf-8-sig"),
    "semicolons": lambda text: text.replace(",", ";").encode(),
    "tabs": lambda text: text.replace(",", "\t").encode(),
}
"""How a queue may be saved."""


@pytest.fixture
def filled(own: tuple[Path, Path], command: Command) -> tuple[Path, str]:
    """A queue of a run, and its text with one label."""
    queue = own[1] / "queue.csv"
    assert command(own[1], "--queue", "3")[0] == 0
    return queue, queue.read_text().replace(",,,", ",,owls,", 1)


def test_labels_in_a_queue_are_never_lost(filled: tuple[Path, str], command: Command) -> None:
    queue, text = filled
    code, _, err = command(queue.parent)
    assert code == 1 and "pseudo.csv: exists already" in err
    others = {
        "a note": (text.replace("owls", "").replace("entropy", "note"), "has the columns"),
        "no queue": ("a,b\n1,2\n", "no column `path`"),
    }
    cases = {name: (save(text), "holds 1 label(s)") for name, save in QUEUES.items()}
    cases |= {name: (content.encode(), said) for name, (content, said) in others.items()}
    cases["Latin-1"] = (text.replace("owls", "zéro").encode("latin-1"), "holds 1 label(s)")
    cases["a workbook"] = (b"PK\3\4" + bytes(30), "no column `path`")
    for name, (content, said) in cases.items():
        queue.write_bytes(content)
        code, _, err = command(queue.parent, "--queue", "3", "--overwrite")
        assert code == 1 and said in err, (name, err)
        assert "move it away" in err and queue.read_bytes() == content, name
    queue.write_text(text.replace("owls", ""))
    assert command(queue.parent, "--queue", "3", "--overwrite")[0] == 0
    code, _, err = command(queue.parent, "--queue", "3", "--output", queue, "--overwrite")
    assert code == 2 and "--queue writes that file" in err


def test_labels_typed_meanwhile_stay(
    filled: tuple[Path, str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, text = filled
    real = pseudo.Answers.queue

    def typing(*arguments: Any, **how: Any) -> np.ndarray:
        queue.write_text(text)
        return real(*arguments, **how)

    monkeypatch.setattr(pseudo.Answers, "queue", typing)
    (queue.parent / "pseudo.csv").write_text("old")
    code, _, err = command(queue.parent, "--queue", "3", "--overwrite")
    assert code == 1 and "queue.csv: was changed by somebody else" in err
    assert queue.read_text() == text and len(rows(queue.parent / "pseudo.csv")) == 29
    queue.unlink()  # so that it appears
    code, _, err = command(queue.parent, "--queue", "3", "--output", queue.parent / "p2.csv")
    assert code == 1 and "was changed by somebody else" in err and queue.read_text() == text


def test_queue_of_a_set_without_paths(digits: Config, command: Command, tmp_path: Path) -> None:
    arguments = (digits.run_dir, "--queue", "2", "--output", tmp_path / "p.csv", "--overwrite")
    assert command(*arguments)[0] == 0
    queue = tmp_path / "queue.csv"
    assert command(*arguments)[0] == 0
    queue.write_text(queue.read_text().replace(",,", ",3,", 1))
    code, _, err = command(*arguments)
    assert code == 1 and "queue.csv: holds 1 label(s)" in err


def test_filled_in_labels_join_the_labeled_images(
    own: tuple[Path, Path], command: Command, tmp_path: Path
) -> None:
    root, run = own
    assert command(run, "--queue", "3", "--quiet")[0] == 0
    queue = rows(run / "queue.csv")
    with (run / "queue.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, queue[0])
        writer.writeheader()
        writer.writerows([{**queue[0], "label": "owls"}, queue[1], {**queue[2], "label": "cats"}])
    folders = [f"--{part}={root / part}" for part in ("labeled", "unlabeled", "val")]
    out = tmp_path / "prepared"
    added = prepare.main([*folders, f"--output={out}", f"--add-labels={run / 'queue.csv'}"])
    assert added == 0
    given = {Path(row["path"]).name: row for row in rows(out / "manifest.csv")}
    for row, label in zip(queue, ("owls", "", "cats"), strict=True):
        found = given[Path(row["path"]).name]
        assert (found["label"], found["split"]) == (label, "labeled" if label else "unlabeled")


def check_tasks(tasks: Any, config: ElementTree.Element) -> None:
    """Against labelstud.io/guide/predictions and /guide/tasks, and the labeling configuration."""
    image, choices = config.find("Image"), config.find("Choices")
    assert config.tag == "View" and image is not None and choices is not None
    assert choices.attrib["toName"] == image.attrib["name"]
    values = [choice.attrib["value"] for choice in choices.findall("Choice")]
    assert isinstance(tasks, list) and tasks
    identifiers = []
    for task in tasks:
        assert set(task) <= {"id", "data", "annotations", "predictions"}
        assert isinstance(task["data"][image.attrib["value"].removeprefix("$")], str)
        for prediction in task["predictions"]:
            assert isinstance(prediction["model_version"], str)
            assert 0 <= prediction["score"] <= 1
            for result in prediction["result"]:
                identifiers.append(result["id"])
                assert result["type"] == choices.tag.lower() == "choices"
                assert result["from_name"] == choices.attrib["name"]
                assert result["to_name"] == image.attrib["name"]
                assert set(result["value"]["choices"]) <= set(values)
                assert len(result["value"]["choices"]) == 1
    assert len(set(identifiers)) == len(identifiers)


def test_a_file_that_has_gone_is_a_row(
    own: tuple[Path, Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, run = own
    gone = root / "unlabeled" / "003.jpg"
    real = pseudo.unlabeled_set

    def and_then_gone(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        gone.unlink()
        return found

    monkeypatch.setattr(pseudo, "unlabeled_set", and_then_gone)
    content = gone.read_bytes()
    try:
        code, _, err = command(run, "--logits", "f.npy")
    finally:
        gone.write_bytes(content)
    assert code == 1 and "1 of 29 images could not be read (first: " in err and "003.jpg" in err
    (bad,) = [row for row in rows(run / "pseudo.csv") if row["status"] != "ok"]
    assert bad["status"].startswith("unreadable: ") and not bad["pseudo_class"] + bad["kept"]
    assert np.isnan(np.load("f.npy")).all(axis=1).sum() == 1


def test_a_set_that_has_changed_is_refused(
    own: tuple[Path, Path], command: Command, tmp_path: Path
) -> None:
    root, run = own
    extra = save(root / "unlabeled" / "zzz.jpg", picture(900))
    try:
        code, _, err = command(run)
    finally:
        extra.unlink()
    assert code == 1 and "not those it was trained on" in err
    assert not list(run.glob("pseudo*"))
    code, _, err = command(tmp_path)
    assert code == 1 and "give a run directory" in err


def test_shards_have_members(command: Command, tmp_path: Path) -> None:
    shards = as_shards(tidy(tmp_path / "data"), tmp_path / "shards")
    parts = {k: str(shards / f"{k}-*.tar") for k in ("labeled", "val")}
    unlabeled = [str(shards / "unlabeled-*.tar")]
    config = own_images(tmp_path, **parts, unlabeled=unlabeled)
    assert command(config.run_dir, "--queue", "3", "--quiet")[0] == 0
    for row in (*rows(config.run_dir / "pseudo.csv"), *rows(config.run_dir / "queue.csv")):
        assert row["path"].endswith(".tar") and row["member"].endswith(".jpg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "a.txt"], "ending must be one of .csv"),
        (["--logits", "a.txt"], "ending must be .npy"),
        (["--queue", "0"], "above 0"),
    ],
)
def test_usage(digits: Config, command: Command, arguments: list[str], said: str) -> None:
    code, out, err = command(digits.run_dir, *arguments)
    assert code == 2 and said in err and len(err.splitlines()) == 1 and not out


def test_the_method_gives_the_labels_of_its_own_step() -> None:
    generator = torch.Generator().manual_seed(0)
    f = 3 * torch.randn(200, 4, generator=generator)
    method = SimPro([9, 5, 3, 1], tau=1.5, threshold=0.7, strong_views=1)
    method.pi_u.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    out = method(f, torch.zeros(200, dtype=torch.long), f, f)
    found = method.pseudo_labels(f)
    assert torch.equal(found.kept, out.mask) and torch.equal(found.labels, out.pseudo_labels)
    assert 0 < found.kept.sum() < 200
    q = torch.softmax(f.double() + 1.5 * method.pi_u.log(), 1)
    torch.testing.assert_close(found.probability.double(), q.max(1).values, rtol=1e-5, atol=0)
