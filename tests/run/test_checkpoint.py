"""Checkpoint files: whole or absent, never executed, found by the rules of `checkpoint.resume`."""

from __future__ import annotations

import os
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from simpro_fast.run.checkpoint import (
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    read_checkpoint,
    save_checkpoint,
)
from simpro_fast.utils.errors import ConfigError, UserError
from tests.processes import run, start, with_small_files


def state(step: int, size: int = 100) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((size,), float(step))}}


def test_round_trip_is_plain_data(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(3), keep=2)
    assert path == checkpoint_path(tmp_path, 3)
    loaded = torch.load(path, weights_only=True)
    assert loaded["step"] == 3
    assert torch.equal(read_checkpoint(path)["model"]["w"], state(3)["model"]["w"])


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save_checkpoint(tmp_path, state(step), keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "step_000000011.pt",
        "step_000000010.pt",
    ]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_damaged_newest_is_named_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save_checkpoint(tmp_path, state(5), keep=2)
    bad = save_checkpoint(tmp_path, state(10, size=5000), keep=2)
    content = bytearray(bad.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray(b"" if damage == "empty" else b"not a checkpoint")
    bad.write_bytes(content)
    found = newest_whole(tmp_path)
    assert found is not None
    assert found[1]["step"] == 5
    assert str(bad) in caplog.text


def test_all_damaged_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (5, 6):
        save_checkpoint(tmp_path, state(step), keep=2)
    for path in list_checkpoints(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
        newest_whole(tmp_path)
    assert [record.getMessage().endswith("trying the one before") for record in caplog.records] == [
        *(True, False)
    ]
    assert all(r.found_by_all for r in caplog.records)  # type: ignore[attr-defined]


class _Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_malicious_file_is_refused_and_not_run(tmp_path: Path, container: str) -> None:
    mark = tmp_path / "ran"
    path = checkpoint_path(tmp_path, 1)
    if container == "torch":
        torch.save({"format": 1, "step": 1, "model": _Attack(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(_Attack(mark)))
    with pytest.raises(UserError, match="damaged or unsafe"):
        read_checkpoint(path)
    assert not mark.exists()


def test_other_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    torch.save({"format": 99}, path)
    with pytest.raises(UserError, match="format 99"):
        read_checkpoint(path)


def test_find_auto_on_an_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "nothing") is None


def test_find_path_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/no/such.*does not exist"):
        find_checkpoint("/no/such/run", tmp_path)
    (tmp_path / "zzz.txt").touch()
    with pytest.raises(UserError, match=r"zzz\.txt"):
        find_checkpoint(str(tmp_path), tmp_path / "other")
    save_checkpoint(tmp_path / "checkpoints", state(4), keep=2)
    with pytest.raises(UserError, match=r"step_000000004\.pt"):
        find_checkpoint(str(tmp_path / "checkpoints" / "step_000000005.pt"), tmp_path)
    for given in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints/step_000000004.pt"):
        found = find_checkpoint(str(given), tmp_path / "other")
        assert found is not None
        assert found[1]["step"] == 4


def test_a_wrong_word_is_answered_with_the_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with a list of the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zzz.txt").touch()
    with pytest.raises(ConfigError, match=r"resume=never: .*auto, none, or the path") as caught:
        find_checkpoint("never", tmp_path / "checkpoints")
    assert "zzz" not in str(caught.value)


def _save(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        save_checkpoint(folder, {"step": 2, "w": torch.zeros(1_000_000)}, keep=2)
    print(caught.value)


def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), keep=2)
    done = run(with_small_files, 100_000, _save, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "earlier checkpoints are kept" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000001.pt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def _write_forever(folder: Path) -> None:
    for step in range(1, 10**9):
        save_checkpoint(folder, {"step": step, "w": torch.full((200_000,), float(step))}, 2)


def test_killed_writer_always_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at 10 moments, most of them in the middle of a save."""
    generator = torch.Generator().manual_seed(0)
    for delay in (0.1 * torch.rand(10, generator=generator)).tolist():
        # Not a child of this process, whose pool of threads another test may have started.
        writer = start(_write_forever, tmp_path, daemon=True)
        while not list_checkpoints(tmp_path):
            time.sleep(0.005)
        time.sleep(delay)
        writer.kill()
        writer.join()
        newest = list_checkpoints(tmp_path)[0]
        loaded = read_checkpoint(newest)
        assert torch.equal(loaded["w"], torch.full((200_000,), float(loaded["step"])))
    save_checkpoint(tmp_path, state(10**8), keep=2)
    assert not list(tmp_path.glob(".*")), "leftovers of killed writers are cleared"
