"""May this configuration go on from what is in the run directory?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from simpro_fast.config import Config, flatten
from simpro_fast.config.explain import shown
from simpro_fast.config.saved import read_saved_config, saved_config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.failures import is_lost_connection
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models import weights_file, weights_sha256
from simpro_fast.run.checkpoint import check_parts, find_checkpoint, newest_whole, step_of
from simpro_fast.run.directory import RunDirectory
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)

# What `Checkpoints.state_dict` gives.
STATE_PARTS: dict[str, type] = {
    "step": int,
    **dict.fromkeys(("tensors", "per_rank", "row", "config", "fingerprint"), dict),
}

# In `fingerprint`, besides `data`, `split` and `weights`: see `ArrayDataset.files_state`.
FILES = "files"
# `ArrayDataset.preprocessing`: keys that are None leave it to the weights and the packed array.
PREPROCESSING = "preprocessing"


def agreed_fingerprint(dataset: ArrayDataset, split: Split, ranks: Ranks) -> dict[str, str]:
    """Agree on what all ranks must hold alike before the first step, and every start of a run.

    Raises:
        ConfigError: ranks hold different data or splits; on every rank.
    """
    data, cut = dataset.fingerprint(), split.hash()
    sizes = f"N={len(split.labeled)}, M={len(split.unlabeled)}"
    made = dataset.preprocessing
    ranks.agree_on({"data": data[:12], "split": f"{cut[:12]} ({sizes})", PREPROCESSING: made})
    # Of rank 0: copies on other machines have times of their own.
    state = dataset.files_state() if ranks.is_main else ""
    files = ranks.gather_bytes(state.encode())[0].decode()
    return {"data": data, "split": cut, PREPROCESSING: made, FILES: files}


def find_state(
    config: Config, run: RunDirectory, fingerprint: dict[str, str], ranks: Ranks
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `checkpoint.resume` means, and its state; None for a fresh start.

    Args:
        fingerprint: digests of the data, its files and the split of this run.

    Raises:
        ConfigError: `none` and the run is not empty, or another configuration was trained.
        UserError: no usable checkpoint where one is asked for, or one of other data or weights.
    """
    wanted = config.checkpoint.resume
    if wanted == "none":
        if not run.is_empty():
            raise ConfigError(
                f"checkpoint.resume=none, but {run.path} is not empty; "
                "choose another name or output_dir, or resume=auto to go on"
            )
        return None
    found = find_checkpoint(wanted, run.checkpoints, check_state)
    if found is not None:
        check_same_run(*found, config, fingerprint)
    # Before anything is built: ranks that start differently would wait for each other for ever.
    ranks.agree_on({"step to resume from": str(found[1]["step"] if found else 0)})
    return found


def check_state(path: Path, state: dict[str, Any]) -> None:
    """Refuse a checkpoint that no run of this version has written.

    Raises:
        UserError: parts are missing or of another type, or its configuration is none.
    """
    check_parts(path, state, STATE_PARTS)
    for part in ("tensors", "per_rank"):
        if not all(isinstance(value, Tensor) for value in state[part].values()):
            raise UserError(f"checkpoint {path}: {part} holds what is no tensor")
    try:
        saved_config(state["config"])
    except ConfigError as error:
        raise UserError(f"checkpoint {path}: its configuration is wrong: {error}") from None


def load_state(
    found: tuple[Path, dict[str, Any]],
    load: Callable[[dict[str, Any]], None],
    config: Config,
    fingerprint: dict[str, str],
    ranks: Ranks,
) -> Path:
    """Give the state of a checkpoint to `load`; where it does not fit, that of the one before.

    A file may be whole and all the same wrong, such as one of another version.

    Args:
        found: what `find_state` has found.
        load: raises where names, shapes or types are not those of the run.
        fingerprint: as in `find_state`.

    Returns:
        the checkpoint that was loaded.

    Raises:
        UserError: it does not fit, and there is none before it or this very file was asked for.
    """
    path, state = found
    while (reason := _misfit(load, state)) is not None:
        wrong = f"checkpoint {path} can be read, but does not fit this run: {reason}"
        if Path(config.checkpoint.resume).is_file():
            raise UserError(wrong)
        older = newest_whole(path.parent, check_state, below=step_of(path))
        if older is None:
            raise UserError(f"{wrong}; there is no other, move the run directory away")
        logger.warning("%s; trying the one before", wrong, extra=FOUND_BY_ALL)
        path, state = older
        check_same_run(path, state, config, fingerprint)
    ranks.agree_on({"step to resume from": str(state["step"])})
    return path


def _misfit(load: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> str | None:
    """Why `load` refuses `state`; None where it does not."""
    try:
        load(state)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_lost_connection(error):
            raise
        return " ".join(str(error).split())[:300] or type(error).__name__
    return None


def check_same_run(
    path: Path, state: dict[str, Any], config: Config, fingerprint: dict[str, str]
) -> None:
    """Refuse a checkpoint of other data or of another configuration; warn of another length.

    Raises:
        UserError: the data, the split or the file of initial weights differ; the image files have
            changed, unless `checkpoint.resume` names this checkpoint.
        ConfigError: lists the keys that differ and may not.
    """
    saved = state["fingerprint"]
    for what in ("data", "split", "features", "prior"):
        old, new = (str(of.get(what, "none"))[:12] for of in (saved, fingerprint))
        if saved.get(what) != fingerprint.get(what):
            raise UserError(
                f"{path} was trained on another {what} ({old} against {new} now); "
                "restore the files, or start a new run"
            )
    if saved.get(FILES, fingerprint[FILES]) != fingerprint[FILES]:
        changed = "since then an image file has changed (size or modification time)"
        if config.checkpoint.resume == "auto":
            raise UserError(
                f"{path}: {changed}; restore the files, start a new run, or go on with the files "
                f"as they are by checkpoint.resume={path}"
            )
        logger.warning("%s: %s; it goes on with them", path, changed, extra=FOUND_BY_ALL)
    before = saved_config(state["config"])
    _refuse_changes(path, before, config)
    _check_weights(path, state["fingerprint"].get("weights"), config)
    if (old := saved.get(PREPROCESSING)) != (new := fingerprint[PREPROCESSING]):
        raise UserError(
            f"{path} was trained on other squares ({old}; now {new}); restore what model.weights "
            "and data.packed were, with the files beside them, or start a new run"
        )
    if state["step"] > config.train.steps:
        raise ConfigError(
            f"{path} is at step {state['step']}, beyond train.steps={config.train.steps}; "
            "raise train.steps, or resume from an earlier checkpoint by its path"
        )
    if before.train.steps != config.train.steps:
        logger.warning(
            "train.steps changes from %d to %d: the learning rate follows the new length",
            before.train.steps,
            config.train.steps,
            extra=FOUND_BY_ALL,
        )


def finished_summary(config: Config) -> dict[str, Any] | None:
    """The summary of a run that has reached `train.steps`, where `resume=auto` finds it.

    Raises:
        ConfigError: it has, but with another configuration.
    """
    if config.checkpoint.resume != "auto":
        return None
    run = RunDirectory(config.run_dir)
    summary = run.read_summary()
    if summary is None or summary["steps"] < config.train.steps:
        return None
    saved = run.path / "config.yaml"
    try:
        before = read_saved_config(saved)
    except ConfigError as error:
        logger.warning("%s: its configuration is not compared", error, extra=FOUND_BY_ALL)
    else:
        _refuse_changes(run.path, before, config)
    return summary


def is_finished(config: Config, ranks: Ranks) -> bool:
    """Whether there is nothing to train any more; says so. Raises as `finished_summary`."""
    summary = finished_summary(config)
    if summary is not None and ranks.is_main:
        top1 = summary["top1"]
        measured = "nothing measured" if top1 is None else f"top-1 {top1:.2f} %"
        logger.info("%s is finished: %d steps, %s", config.run_dir, summary["steps"], measured)
    return summary is not None


def _refuse_changes(path: Path, before: Config, now: Config) -> None:
    """Refuse changes of the training; the keys and docs/survival.md say what may change."""
    old, new, changes = flatten(before), flatten(now), type(now).changes()
    if None in (before.model.weights, now.model.weights):
        changes["model.weights"] = "training"  # there is no content to compare

    def listed(what: str) -> str:
        # Options of another method go with its name.
        keys = [k for k in new if k in old and new[k] != old[k] and changes[k] == what]
        return ", ".join(f"{k}: {shown(old[k])} -> {shown(new[k])}" for k in keys)

    if refused := listed("training"):
        raise ConfigError(
            f"{path} belongs to another configuration ({refused}); "
            "undo the change, or start a new run with another name"
        )
    if rounding := listed("rounding"):
        logger.info("from here on numbers may round differently (%s)", rounding)


def _check_weights(path: Path, saved: str | None, config: Config) -> None:
    """The file that the weights came from is compared if it is still there.

    It may be gone where the checkpoint holds all weights; a frozen backbone is read from it.

    Raises:
        UserError: it is another file now.
    """
    if saved is None or config.model.weights is None:
        return
    try:
        file = weights_file(config.model)
    except UserError:
        file = None
    if file is None or not file.exists():
        if config.freezes_backbone:
            raise UserError(
                f"model.weights={config.model.weights} is gone, and {path} leaves the frozen "
                "backbone to it; restore the file, or give model.weights=FILE with its new place"
            )
        logger.info("%s is gone; the weights are in %s", config.model.weights, path)
    elif (digest := weights_sha256(file)) != saved:
        raise UserError(
            f"{path} started from other weights than model.weights={file} has now "
            f"({saved[:12]} against {digest[:12]}); restore the file, or start a new run"
        )
