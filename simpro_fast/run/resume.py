"""May this configuration go on from what is in the run directory?"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from simpro_fast.config import Config, flatten, load_config, parse_config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.errors import ConfigError, UserError
from simpro_fast.models import weights_sha256
from simpro_fast.run.checkpoint import check_keys, find_checkpoint
from simpro_fast.run.directory import RunDirectory
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)

STATE_KEYS = {
    *("step", "model", "optimizer", "ema", "method", "accumulators"),
    *("top1", "seconds", "fingerprint", "config"),
}

# What may differ between the run that saved a checkpoint and the one that goes on from it.
MAY_CHANGE = (
    "distributed.",
    "device",
    "checkpoint.",
    "log.",
    "train.steps",
    "output_dir",
    "data.resident",
    "data.prefetch",
    "data.on_bad_image",  # changes nothing but what happens at a damaged file
)


def find_state(
    config: Config, run: RunDirectory, fingerprint: dict[str, str], ranks: Ranks
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `checkpoint.resume` means, and its state; None for a fresh start.

    Args:
        fingerprint: digests of the data and the split of this run.

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
    found = find_checkpoint(wanted, run.checkpoints)
    if found is not None:
        check_same_run(*found, config, fingerprint)
    # Before anything is built: ranks that start differently would wait for each other for ever.
    ranks.agree_on({"step to resume from": str(found[1]["step"] if found else 0)})
    return found


def check_same_run(
    path: Path, state: dict[str, Any], config: Config, fingerprint: dict[str, str]
) -> None:
    """Refuse a checkpoint of other data or of another configuration; warn of another length.

    Raises:
        UserError: the data, the split or the file of initial weights differ.
        ConfigError: lists the keys that differ and may not.
    """
    check_keys(path, state, STATE_KEYS)
    for what, digest in fingerprint.items():
        saved = state["fingerprint"][what]
        if saved != digest:
            raise UserError(
                f"{path} was trained on another {what} ({saved[:12]} against {digest[:12]} now); "
                "restore the files, or start a new run"
            )
    before = parse_config(state["config"])
    _refuse_changes(path, before, config)
    _check_weights(path, state["fingerprint"].get("weights"), config)
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


def is_finished(config: Config, ranks: Ranks) -> bool:
    """Whether `resume=auto` meets a run that has reached `train.steps`; says so.

    Raises:
        ConfigError: it has, but with another configuration.
    """
    if config.checkpoint.resume != "auto":
        return False
    run = RunDirectory(config.run_dir)
    summary = run.read_summary()
    if summary is None or summary["steps"] < config.train.steps:
        return False
    saved = run.path / "config.yaml"
    try:
        before = load_config(saved)
    except ConfigError as error:
        raise ConfigError(f"{saved}: {error}; move the run directory away") from None
    _refuse_changes(run.path, before, config)
    if ranks.is_main:
        top1 = summary["top1"]
        measured = "nothing measured" if top1 is None else f"top-1 {top1:.2f} %"
        logger.info("%s is finished: %d steps, %s", run.path, summary["steps"], measured)
    return True


def _refuse_changes(path: Path, before: Config, now: Config) -> None:
    old, new = flatten(before), flatten(now)
    differing = [k for k in new if new[k] != old[k] and not k.startswith(MAY_CHANGE)]
    if None not in (before.model.weights, now.model.weights):
        differing = [k for k in differing if k != "model.weights"]  # the content is compared
    if differing:
        listed = ", ".join(f"{k}: {old[k]!r} -> {new[k]!r}" for k in differing)
        raise ConfigError(
            f"{path} belongs to another configuration ({listed}); "
            "undo the change, or start a new run with another name"
        )


def _check_weights(path: Path, saved: str | None, config: Config) -> None:
    """The checkpoint holds the weights; the file they came from is compared if it is still there.

    Raises:
        UserError: it is another file now.
    """
    file = config.model.weights
    if saved is None or file is None:
        return
    if not file.exists():
        logger.info("%s is gone; the weights are in %s", file, path)
    elif (digest := weights_sha256(file)) != saved:
        raise UserError(
            f"{path} started from other weights than model.weights={file} has now "
            f"({saved[:12]} against {digest[:12]}); restore the file, or start a new run"
        )
