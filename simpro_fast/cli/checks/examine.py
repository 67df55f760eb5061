"""All checks, one after another, as this launch would train; a failing one hides no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from simpro_fast.cli.checks import machine
from simpro_fast.cli.checks import ranks as among_ranks
from simpro_fast.cli.checks.table import Line, merge
from simpro_fast.config import Config, load_config, parse_config
from simpro_fast.distributed.environment import world_size_from_environment
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.machine import host_name

DEFAULT = "digits_lt/reversed"
DIGITS_RANKS = 64
"""It has 131 labeled images, and every rank needs one."""


def trial_config(config: Config) -> Config:
    """Steps on data that every installation has, as this launch would train.

    Digits, or made-up images where there are more ranks than labeled digits.
    """
    world = world_size_from_environment()
    changes = [
        f"data.batch_size={max(1, 32 // world) * world}",
        "data.mu=2",
        "train.steps=3",
        "train.period=3",
        f"device={config.device}",
        f"distributed.engine={config.distributed.engine}",
        f"distributed.start_timeout={config.distributed.start_timeout}",
        "distributed.collective_timeout=60",
        "log.progress=off",
    ]
    if world > DIGITS_RANKS:
        changes += ["data.name=synthetic", "data.test_per_class=null"]
        changes += [f"data.labeled_max={world}", f"data.unlabeled_max={2 * world}"]
    if config.train.threads is not None:
        changes.append(f"train.threads={config.train.threads}")
    if config.distributed.listen is not None:
        changes.append(f"distributed.listen={config.distributed.listen}")
    return load_config(DEFAULT, changes)


def timed_config(config: Config) -> Config:
    """The configuration as views and steps are timed: quiet, and with its own data.

    Where these are too many to be read here, with made-up images of the same size and number.
    """
    from simpro_fast.cli.checks.data import found_only

    config = config.model_copy(update={"log": config.log.model_copy(update={"progress": "off"})})
    data = config.data
    if found_only(data) is None:
        return config
    kept = ("batch_size", "mu", "labeled_views", "strong_views", "cutout", "flip", "shift")
    tree = config.model_dump(mode="json")
    tree["data"] = {
        **{key: tree["data"][key] for key in (*kept, "prefetch", "resident")},
        **{"name": "synthetic", "image_size": data.image_size or {"stl10": 96}.get(data.name)},
        **{"gamma_labeled": 1, "labeled_max": data.batch_size},
        "unlabeled_max": data.batch_size * data.mu,
    }
    return parse_config(tree)


def examine(config: Config, folder: Path, *, given: bool) -> tuple[Ranks, list[Line]]:
    """Run all checks.

    Args:
        folder: of the run.
        given: the configuration was named, so its own data, network and batches are timed, unless
            a check before found a problem with its ranks or data; else a small trial is.

    Returns:
        this rank among all, and the table's lines (merged over ranks, equal on all of them).

    Raises:
        UserError: the ranks did not find each other.
    """
    trial = trial_config(config)
    ranks = start_ranks(trial)
    # DALI and the trainer, after the device is known
    from simpro_fast.cli.checks import data, speed

    lines: list[Line] = []

    def in_order() -> bool:
        problems = {line.check for line in lines if line.verdict == "problem"}
        return given and not problems & {"ranks", "data"}

    def timed() -> Config:
        return timed_config(config) if in_order() else trial

    checks: list[tuple[str, Callable[[], Line]]] = [
        ("machine", machine.check_machine),
        ("versions", machine.check_versions),
        ("ranks", lambda: among_ranks.check_ranks(config, ranks)),
        ("links", lambda: among_ranks.check_links(ranks)),
        ("clocks", lambda: among_ranks.check_clocks(ranks)),
        ("folder", lambda: among_ranks.check_folder(ranks, folder)),
        ("disk", lambda: machine.check_disk(config, folder)),
        ("data", lambda: data.check_data(config, ranks)),
        ("decoding", lambda: speed.check_decoding(ranks)),
        ("views", lambda: speed.check_views(timed(), ranks)),
        ("training", lambda: speed.check_training(timed(), ranks, whole=in_order())),
        ("kernels", lambda: speed.check_kernels(ranks)),
    ]
    hosts = [text.decode() for text in ranks.gather_bytes(host_name().encode())]
    for name, check in checks:
        line = replace(guarded(check), check=name)
        try:
            lines.append(merge(ranks.gather_bytes(line.to_bytes()), hosts))
        except (RuntimeError, dist.DistError):
            lost = "the ranks lost each other in this check; the rest is not checked"
            cure = f"this rank: {line.found}" if line.verdict == "problem" else ""
            lines.append(Line("problem", lost, cure or "see the messages of the others", name))
            break
    return ranks, lines


def guarded(check: Callable[[], Line]) -> Line:
    """The check's line, or a problem that says how the check itself failed."""
    try:
        return check()
    except UserError as error:
        return Line("problem", str(error))
    except Exception as error:  # whatever is wrong with this machine is what we are here for
        reason = (str(error) or "no message").splitlines()[0][:200]
        return Line("problem", f"failed with {type(error).__name__}: {reason}")
