"""Tasks for Label Studio: its basic JSON format with predictions (labelstud.io/guide/predictions).

An exported CSV of Label Studio has a column for each item of `data` and one named by the control,
here `label`: with `path` and `member` in `data`, `prepare --add-labels` reads it as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from simpro_fast.answers.writers import Columns, Format, move
from simpro_fast.utils.errors import ConfigError

CONTROL, OBJECT = "label", "image"
SERVED = "/data/local-files/?d="
"""Where Label Studio serves files below its LOCAL_FILES_DOCUMENT_ROOT."""


class Tasks(Format):
    """One task an image that could be read; of columns with absolute paths.

    Args:
        root: Label Studio's document root, absolute.
        version: of the model, as its users see it.
    """

    def __init__(self, root: Path, version: str) -> None:
        self._root, self._version = f"{root}{os.sep}".replace("//", "/"), version
        self._written = 0

    def head(self) -> bytes:
        return b"["

    def encode(self, columns: Columns) -> bytes:
        out = []
        for path, name, p in zip(
            columns["path"], columns["pseudo_class"], columns["pseudo_probability"], strict=True
        ):
            if name is not None:
                separator = ",\n" if self._written else "\n"
                self._written += 1
                out.append(separator + json.dumps(self._task(path, name, float(p))))
        return "".join(out).encode()

    def finish(self, partial: Path, final: Path, rows: int) -> None:
        with partial.open("ab") as file:
            file.write(b"\n]\n")
        move(partial, final)

    def _task(self, path: str, name: str, probability: float) -> dict[str, object]:
        if not path.startswith(self._root):
            raise ConfigError(
                f"{path}: lies outside {self._root}, which Label Studio would serve; give another "
                "--base"
            )
        result = {
            "id": f"result{self._written}",
            "type": "choices",
            "from_name": CONTROL,
            "to_name": OBJECT,
            "value": {"choices": [name]},
        }
        prediction = {"model_version": self._version, "score": probability, "result": [result]}
        inside = quote(os.fsencode(path[len(self._root) :]))
        return {
            "data": {OBJECT: f"{SERVED}{inside}", "path": path},
            "predictions": [prediction],
        }


def labeling_config(class_names: Sequence[str]) -> str:
    """The labeling configuration that the tasks are for, XML."""
    choices = "\n".join(f"    <Choice value={quoteattr(name)}/>" for name in class_names)
    return (
        f'<View>\n  <Image name="{OBJECT}" value="${OBJECT}"/>\n'
        f'  <Choices name="{CONTROL}" toName="{OBJECT}" choice="single">\n{choices}\n'
        "  </Choices>\n</View>\n"
    )
