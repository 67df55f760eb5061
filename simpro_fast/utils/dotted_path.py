"""Functions of a user's own package, named by `package.module.function`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from simpro_fast.utils.errors import ConfigError


def is_dotted(name: str) -> bool:
    """Whether `name` has the form `module.function`."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def import_function(key: str, name: str, kind: str = "function") -> Callable[..., Any]:
    """The function (or class) at `package.module.function`; importing runs the module's code.

    Args:
        key: configuration key that holds `name`, for errors.
        kind: what is looked for, for errors.

    Raises:
        ConfigError: no such module on Python's path, it fails on import, or it has no such
            function; the nearest is named.
    """
    module_name, _, function_name = name.rpartition(".")
    said = f"{key}={name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise ConfigError(f"{said}: {module_name} needs the package {missing}") from None
        raise ConfigError(
            f"{said}: there is no module {missing} on Python's path; "
            "install it, or set PYTHONPATH to the folder that it is in (PYTHONPATH=. for this one)"
        ) from None
    except Exception as error:  # whatever a stranger's module raises
        lines = str(error).splitlines() or [""]
        raise ConfigError(
            f"{said}: importing {module_name} failed ({type(error).__name__}: {lines[0]})"
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        functions = [n for n, o in vars(module).items() if callable(o) and not n.startswith("_")]
        near = difflib.get_close_matches(function_name, functions, n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{said}: {module_name} has no {kind} {function_name}{hint}")
    function: Callable[..., Any] = found
    return function
