"""All checks, one after another, as this launch would train; a failing one hides no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from simpro_fast.cli.checks import machine
from simpro_fast.cli.checks import ranks as among_ranks
from simpro_fast.cli.checks.table import Line, merge
from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.machine import host_name

DEFAULT = "digits_lt/reversed"


def examine(config: Config, folder: Path) -> tuple[Ranks, list[Line]]:
    """Run all checks.

    Args:
        folder: of the run.

    Returns:
        this rank among all, and the table's lines (merged over ranks, equal on all of them).

    Raises:
        UserError: the ranks did not find each other.
    """
    # A link that hangs is found soon, whatever training waits for.
    limits = config.distributed.model_copy(update={"collective_timeout": 60.0})
    ranks = start_ranks(config.model_copy(update={"distributed": limits}))
    # DALI and the kernels, after the device is known
    from simpro_fast.cli.checks import computing, data

    lines: list[Line] = []
    checks: list[tuple[str, Callable[[], Line]]] = [
        ("machine", machine.check_machine),
        ("versions", machine.check_versions),
        ("ranks", lambda: among_ranks.check_ranks(config, ranks)),
        ("links", lambda: among_ranks.check_links(ranks)),
        ("clocks", lambda: among_ranks.check_clocks(ranks)),
        ("folder", lambda: among_ranks.check_folder(ranks, folder)),
        ("disk", lambda: machine.check_disk(config, folder)),
        ("data", lambda: data.check_data(config, ranks)),
        ("decoding", computing.check_decoding),
        ("kernels", lambda: computing.check_kernels(ranks)),
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
