"""Which file a configuration's name means."""

from __future__ import annotations

import difflib
from pathlib import Path

from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.regular_file import FOLDER, MISSING, no_file


def shipped_configs() -> Path:
    """Folder of the shipped configurations: in the package of a wheel, at the top of the tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(source: str | Path) -> Path:
    """Path of a configuration file, on disk or among the shipped ones."""
    path = Path(source)
    reason = no_file(path)
    if reason is None:
        return path
    if reason not in (MISSING, FOLDER):
        raise ConfigError(f"configuration {str(source)[:300]} {reason}; name another file")
    shipped = shipped_configs()
    name = str(source).removesuffix(".yaml").removeprefix("configs/")
    candidate = shipped / f"{name}.yaml"
    if candidate.is_file():
        return candidate
    for folder in (path, shipped / name):
        if stems := _stems(folder):
            raise ConfigError(f"{source} is a folder; take one of its files: {_listed(stems)}")
    for folder, stem in ((candidate.parent, candidate.stem), (path.parent, path.stem)):
        if stems := _stems(folder):
            start = str(source).removesuffix(path.name)
            close = difflib.get_close_matches(stem, stems, n=1)
            hint = f"did you mean '{start}{close[0]}'?" if close else f"there is {_listed(stems)}"
            raise ConfigError(f"no configuration file {source}; {hint}")
    folders = sorted(p.name for p in shipped.iterdir() if _stems(p))
    names = [f"{folder}/{stem}" for folder in folders for stem in _stems(shipped / folder)]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"the shipped ones are in {_listed(folders)}"
    raise ConfigError(f"no configuration file {source}; {hint}")


def is_config_name(word: str = "") -> bool:
    """Whether a word can only mean a configuration: a YAML file, or a name in a shipped folder."""
    if "=" in word or not word:
        return False
    path = Path(word.removeprefix("configs/"))
    return path.suffix in (".yaml", ".yml") or bool(
        not Path(word).is_file() and path.parts and _stems(shipped_configs() / path.parts[0])
    )


def _stems(folder: Path) -> list[str]:
    """Names of a folder's configurations; in one like `_base` there are only parts of them."""
    if folder.name.startswith("_") or not folder.is_dir():
        return []
    return sorted(p.stem for p in folder.glob("*.yaml"))


def _listed(names: list[str], most: int = 20) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
