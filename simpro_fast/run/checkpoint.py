"""Checkpoints: one world-size-free file per step, written whole or not at all.

A file holds tensors and plain types only and is read with `weights_only=True`, so one from a
stranger cannot run code. Its zip container carries checksums, which are verified before loading.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from simpro_fast.config.schema import CheckpointConfig
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import ConfigError, OutputError, PeerError, UserError
from simpro_fast.utils.logs import FOUND_BY_ALL
from simpro_fast.utils.regular_file import check_regular

FORMAT = 1
_NAME = re.compile(r"step_(\d{9})\.pt")
Check = Callable[[Path, dict[str, Any]], None]
logger = logging.getLogger(__name__)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:09d}.pt"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files of a folder, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), reverse=True)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not named like a checkpoint (step_000001000.pt)")
    return int(match.group(1))


def save_checkpoint(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `state["step"]` and keep the newest `keep` files.

    The file appears under its name only when it is complete and on disk; a failure leaves all
    earlier checkpoints as they are.

    Raises:
        OutputError: the disk is full or the folder cannot be written.
    """
    path = checkpoint_path(folder, state["step"])
    _remove(lambda: folder.glob(".step_*"))  # of killed writers
    try:
        with replacing(path) as file:
            torch.save({"format": FORMAT, **state}, file)
    except OutputError as error:
        raise OutputError(
            f"cannot save checkpoint {error}; earlier checkpoints are kept. "
            "Start again to resume from the last of them"
        ) from None
    _remove(lambda: [old for old in list_checkpoints(folder)[keep:] if old != path])
    return path


def _remove(find: Callable[[], Iterable[Path]]) -> None:
    """Remove files that are of no more use; a folder that has become read-only keeps them."""
    try:
        for path in find():
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("an old checkpoint cannot be removed: %s", error)


def save_on_main(
    folder: Path, state: dict[str, Any], config: CheckpointConfig, ranks: Ranks
) -> bool:
    """`save_checkpoint` on rank 0, while the others wait and learn whether there is a file.

    Returns:
        whether it was saved; never False with `checkpoint.on_error=stop`.

    Raises:
        UserError: it was not saved, with `checkpoint.on_error=stop`; on every rank.
    """
    refused: UserError | None = None
    if ranks.is_main:
        try:
            save_checkpoint(folder, state, config.keep)
        except UserError as error:
            refused = error
    failed = torch.tensor([float(refused is not None)], device=ranks.device)
    if not ranks.sum(failed).item():
        return True
    if config.on_error == "stop":
        step = state["step"]
        said = f"rank 0 could not save the checkpoint of step {step}"
        raise refused or PeerError(said, OutputError.exit_code)
    if refused is not None:
        logger.warning("%s; training goes on (checkpoint.on_error=continue)", refused)
    return False


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load one file onto the CPU after verifying its checksums.

    Raises:
        UserError: missing, damaged, of another format, or holding anything but plain data.
    """
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"checkpoint {path} is damaged: checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint {path}") from None
    except UserError:
        raise
    except Exception as error:  # torch raises many types for a broken or malicious file
        # torch's own first line advises to switch the protection off.
        refused = re.search(r"GLOBAL\s+([\w.]+)", str(error))
        reason = (
            f"it holds {refused[1]}, and loading that could run code"
            if refused
            else str(error).splitlines()[0][:200]
        )
        raise UserError(f"checkpoint {path} is damaged or unsafe: {reason}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise UserError(f"checkpoint {path} has format {found}, this version reads {FORMAT}")
    return state


def check_parts(path: Path, state: dict[str, Any], wanted: dict[str, type]) -> None:
    """Refuse a checkpoint that lacks a part of the state, or has something else in its place.

    Raises:
        UserError: naming the parts.
    """
    wrong = sorted(key for key, kind in wanted.items() if not isinstance(state.get(key), kind))
    if wrong:
        raise UserError(f"checkpoint {path} lacks {', '.join(wrong)}; it was not written by us")


def newest_whole(
    folder: Path, check: Check = lambda path, state: None, below: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read; damaged newer ones are named in a warning.

    Args:
        check: raises UserError where a state is wrong, which then counts as damaged.
        below: only checkpoints of earlier steps.

    Raises:
        UserError: there are checkpoints and every one of them is damaged.
    """
    paths = [p for p in list_checkpoints(folder) if below is None or step_of(p) < below]
    for path in paths:
        try:
            state = read_checkpoint(path)
            check(path, state)
            return path, state
        except UserError as error:
            rest = "; trying the one before" if path != paths[-1] else ""
            logger.warning("%s%s", error, rest, extra=FOUND_BY_ALL)
    if paths:
        raise UserError(
            f"every checkpoint in {folder} is damaged ({len(paths)} files); "
            "move the run directory away to start again"
        )
    return None


def find_checkpoint(
    resume: str, folder: Path, check: Check = lambda path, state: None
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `checkpoint.resume` means, or None for a fresh start (`auto` only).

    Args:
        resume: `auto` or the path of a checkpoint file, of a checkpoints folder, or of a run.
        folder: checkpoints folder of this run, searched by `auto`.
        check: see `newest_whole`.

    Raises:
        ConfigError: neither a word nor a path that leads to a checkpoint; lists what is there.
        UserError: the file, or every one in the folder, is damaged.
    """
    if resume == "auto":
        return newest_whole(folder, check)
    path = Path(resume)
    if path.is_file():
        state = read_checkpoint(path)
        check(path, state)
        return path, state
    for candidate in (path, path / "checkpoints"):
        found = newest_whole(candidate, check)
        if found is not None:
            return found
    near = next((p for p in (path, path.parent) if p.is_dir()), None)
    allowed = "give auto, none, or the path of a checkpoint or a run"
    if len(path.parts) == 1 and not path.exists():  # a word; the working directory tells nothing
        raise ConfigError(f"checkpoint.resume={resume}: no such file or folder; {allowed}")
    there = ", ".join(sorted(p.name for p in near.iterdir())[:20]) if near else ""
    listing = f"{near} holds: {there or 'nothing'}" if near else f"{path.parent} does not exist"
    raise ConfigError(f"checkpoint.resume={resume}: no checkpoint there; {listing}; {allowed}")
