"""The one parser class of all commands: errors are one line, and name the nearest valid flag."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from simpro_fast.cli.key_hints import hint
from simpro_fast.config.find import is_config_name
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.local_files import remote


def positive(text: str) -> int:
    """A whole number above 0, for `type=`."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _local_path(text: str) -> Path:
    if why := remote(text):
        raise argparse.ArgumentTypeError(why)
    return Path(text)


class _Version(argparse.Action):
    """Looked up when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"simpro_fast {version('simpro_fast')}", flush=True)
        parser.exit()


_COMMON: dict[str, tuple[str, dict[str, Any]]] = {
    "json": (
        "--json",
        {"action": "store_true", "help": "print one JSON document and nothing else on stdout"},
    ),
    "quiet": ("--quiet", {"action": "store_true", "help": "say nothing but errors"}),
    "device": (
        "--device",
        {
            "choices": ("auto", "cpu", "cuda"),
            "default": "auto",
            "help": "where the network runs; auto: a GPU where there is one",
        },
    ),
    "trust_code": (
        "--trust-code",
        {
            "action": "store_true",
            "help": "import a network, data set or method of one's own, as the run names it",
        },
    ),
    "batch_size": (
        "--batch-size",
        {"type": positive, "default": 256, "metavar": "N", "help": "images per forward pass (256)"},
    ),
    "threads": (
        "--threads",
        {"type": positive, "metavar": "N", "help": "CPU threads; default: the cores there are"},
    ),
}


class CommandParser(argparse.ArgumentParser):
    """Strict flags, free order.

    Args:
        prog: name shown in the usage line.
        description: first lines of `--help`.
        epilog: last lines of `--help`.
    """

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.register("type", Path, _local_path)  # of every `type=Path`
        self.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")

    def print_help(self, file: Any = None) -> None:
        # argparse keeps a pipe that has broken to itself, or leaves it for the interpreter's exit.
        print(self.format_help(), end="", file=file, flush=True)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse; overrides (`key.sub=value`) may stand anywhere between flags.

        Where there is `--config`, a first word that names a configuration is taken for it.

        Raises:
            ConfigError: an unknown flag, a missing or an impossible value. A flag that is a
                configuration key is answered with the key.
        """
        known, rest = self.parse_known_args(arguments)
        unknown = [item for item in rest if item.startswith("-") or not hasattr(known, "overrides")]
        if unknown:
            said = hint(unknown[0]) if hasattr(known, "overrides") else None
            raise ConfigError(f"unknown argument {unknown[0]}{said or self._nearest(unknown[0])}")
        if rest:
            known.overrides += rest
        if getattr(known, "config", "") is None and is_config_name(*known.overrides[:1]):
            known.config = known.overrides.pop(0)
        return known

    def add_overrides(self, help: str | None = None) -> None:
        """Accept `key.sub=value`, and the rank argument that launchers put before ours."""
        # The deepspeed launcher's own; the environment has it too.
        self.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
        self.add_argument("overrides", nargs="*", metavar="key.sub=value", help=help)

    def add_common(self, *names: str) -> None:
        """Add flags that verbs share: `json`, `quiet`, `device`, `batch_size`,
        `threads`, `trust_code`.

        `--version` and `--help` belong to every verb.
        """
        for name in names:
            flag, options = _COMMON[name]
            self.add_argument(flag, **options)

    def _nearest(self, argument: str) -> str:
        flags = [f.lstrip("-") for action in self._actions for f in action.option_strings]
        # Without the dashes, which all flags share.
        close = difflib.get_close_matches(argument.partition("=")[0].lstrip("-"), flags, n=1)
        return f"; did you mean --{close[0]}?" if close else "; see --help"
