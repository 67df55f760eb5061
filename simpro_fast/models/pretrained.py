"""Weights from a file (`model.weights`) into a network with a new head.

Files come from strangers: a safetensors file cannot run code, and a torch file is read with
`weights_only=True`, which refuses everything but tensors and plain values.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from simpro_fast.models.head import head_of
from simpro_fast.models.timm_nets import converted
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.regular_file import read_regular

# Under what names training scripts keep a state dict; the first that is there counts.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema", "state_dict_ema", "ema")


@dataclass(frozen=True)
class PretrainedReport:
    """Outcome for the tensors of a weights file; names in the network's order."""

    file: str
    sha256: str
    """Digest of the file's bytes."""
    matched: int
    """Tensors of the network that were filled."""
    total: int
    """Tensors of the network, batch-norm statistics included."""
    dropped: tuple[str, ...]
    """The head, when its shape is another; it stays as initialised."""
    missing: tuple[str, ...]
    """Not in the file; they stay as initialised."""
    unexpected: tuple[str, ...]
    """In the file and not in the network."""
    head: bool
    """Whether the head was filled."""
    prefix: str = ""
    """Taken off the file's names."""

    def __str__(self) -> str:
        taken_off = f" without the prefix {self.prefix!r}" if self.prefix else ""
        parts = [f"{self.matched} of {self.total} tensors matched{taken_off}"]
        for what, names in (
            ("dropped (another number of classes)", self.dropped),
            ("missing, left as initialised", self.missing),
            ("unexpected, not used", self.unexpected),
        ):
            if names:
                parts.append(f"{what}: {_first(names)}")
        return "; ".join(parts)


def load_pretrained(network: nn.Module, path: Path) -> PretrainedReport:
    """Fill a network on the CPU, in place, from a safetensors file or a torch state dict.

    A state dict may lie under one of `_WRAPPERS`. Wrappers prepend to names (`module.`,
    `module.encoder_q.`, `backbone.`): the one prefix under which most of the network's names are
    found is taken off. Of timm's networks the original authors' names are known as well, and
    position embeddings are resampled. The head is left out as a whole when one of its tensors has
    another shape; no other tensor may. Half precision is widened.

    Raises:
        UserError: the file is missing, damaged, or more than tensors and plain values; a tensor
            outside the head has another shape or kind, or is not finite; fewer than half of the
            network's tensors are in the file. The network is then as it was.
    """
    content = _read(path)
    given, others = _named_tensors(_parse(content, path), path)
    own = network.state_dict(keep_vars=True)
    prefix = _common_prefix(given, own)
    others += [name for name in given if not name.startswith(prefix)]
    given = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
    try:
        given = dict(converted(network, given))
    except (LookupError, RuntimeError, ValueError) as error:
        raise UserError(
            f"model.weights={path} does not fit this network ({' '.join(str(error).split())[:150]})"
            "; set the model.name that the file was made with"
        ) from None
    head = {id(parameter) for parameter in head_of(network).parameters()}
    head_names = tuple(name for name, tensor in own.items() if id(tensor) in head)
    dropped: tuple[str, ...] = ()
    if any(name in given and given[name].shape != own[name].shape for name in head_names):
        dropped = tuple(name for name in head_names if name in given)
    matched = [name for name in own if name in given and name not in dropped]
    _check_matched(path, given, own, matched)
    with torch.no_grad():
        for name in matched:
            own[name].copy_(given[name])
    return PretrainedReport(
        file=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        matched=len(matched),
        total=len(own),
        dropped=dropped,
        missing=tuple(name for name in own if name not in given),
        head=set(head_names) <= set(matched),
        unexpected=(*(name for name in given if name not in own), *others),
        prefix=prefix,
    )


def weights_sha256(path: Path) -> str:
    """Hash of a weights file, as in `PretrainedReport`. Raises UserError if it cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    """Once and whole, so that the recorded hash is that of what was loaded."""
    if path.is_dir():
        raise UserError(f"model.weights={path} is a folder; give the weights file in it")
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise UserError(f"model.weights={path} does not exist; check the path") from None
    except OSError as error:
        raise UserError(f"model.weights={path} cannot be read: {error.strerror}") from None
    if not content:
        raise UserError(f"model.weights={path} is empty; fetch or copy it again")
    return content


def _parse(content: bytes, path: Path) -> Any:
    """The file's content, by what it is and not by its ending."""
    if content[8:9] == b"{":  # safetensors: the header's length in 8 bytes, then JSON
        try:
            return load_safetensors(content)
        except (SafetensorError, KeyError, ValueError) as error:
            raise _damaged(path, error) from None
    try:
        if content[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise _damaged(path, f"checksum of {broken}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; what matters raises
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # torch raises many types for a broken or malicious file
        refused = re.search(r"GLOBAL\s+([\w.]+)", str(error))
        if refused:
            raise UserError(
                f"model.weights={path} is refused: it holds {refused[1]}, and loading that could "
                "run code; save the network's state_dict() alone, or as safetensors"
            ) from None
        raise _damaged(path, error) from None


def _damaged(path: Path, reason: object) -> UserError:
    # torch puts pages of advice, and the reason last
    text = str(reason).rpartition("WeightsUnpickler error: ")[2].strip()
    first = (text.splitlines() or [type(reason).__name__])[0][:150]
    return UserError(
        f"model.weights={path} is damaged, cut short or not a weights file ({first}); "
        "fetch or copy it again"
    )


def _named_tensors(content: Any, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by plain name, and the names of everything else beside them."""
    for _ in range(2):  # not `while`: a file may contain itself
        if isinstance(content, Mapping):
            wrapped = [content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping)]
            content = wrapped[0] if wrapped else content
    if not isinstance(content, Mapping):
        raise UserError(
            f"model.weights={path} holds a {type(content).__name__}, not tensors by name; "
            "save the network's state_dict()"
        )
    tensors = {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}
    if not tensors:
        raise UserError(
            f"model.weights={path} holds no tensors by name (keys: {_first(map(str, content))}); "
            "save the network's state_dict()"
        )
    others = [str(key) for key in content if key not in tensors]
    return tensors, others


def _common_prefix(given: Iterable[str], own: Mapping[str, Tensor]) -> str:
    """The prefix, empty or ending in a dot, under which most names of the network are found."""
    found: Counter[str] = Counter()
    for name in given:
        place = 0
        while True:
            if name[place:] in own:
                found[name[:place]] += 1
            place = name.find(".", place) + 1
            if not place:
                break
    # Among equals the shortest, so that plain names win.
    return min(found, key=lambda prefix: (-found[prefix], len(prefix)), default="")


def _check_matched(
    path: Path, given: Mapping[str, Tensor], own: Mapping[str, Tensor], matched: list[str]
) -> None:
    for name in matched:
        theirs, ours = given[name], own[name]
        if theirs.shape != ours.shape:
            raise UserError(
                f"model.weights={path}: {name} is {list(theirs.shape)} there and "
                f"{list(ours.shape)} in this network; only the head may differ, so set the "
                "model.name and data.image_size that the file was made with"
            )
        dense = theirs.layout == torch.strided and not theirs.is_quantized
        if not dense or theirs.is_floating_point() != ours.is_floating_point():
            raise UserError(
                f"model.weights={path}: {name} is {theirs.dtype} ({theirs.layout}) there, "
                f"{ours.dtype} was expected; convert it to plain float tensors"
            )
        if not torch.isfinite(theirs.to(ours.dtype)).all():
            raise UserError(
                f"model.weights={path}: {name} has values that are not finite in {ours.dtype}; "
                "take another file"
            )
    if 2 * len(matched) < len(own):
        raise UserError(
            f"model.weights={path}: only {len(matched)} of the network's {len(own)} tensors are "
            f"in it; there: {_first(given)}; the network: {_first(own)}; "
            "set the model.name that the file was made with"
        )


def _first(names: Iterable[str]) -> str:
    """The first three of some names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
