"""`model.weights=hf-hub:ORG/NAME`: files of the Hugging Face hub, from its local cache."""

from __future__ import annotations

import json
from pathlib import Path

from simpro_fast.config.schema import ModelConfig
from simpro_fast.models.timm_nets import PREFIX, Preprocessing, expected_preprocessing
from simpro_fast.utils.errors import UserError, pip_line

HUB = "hf-hub:"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def weights_file(model: ModelConfig) -> Path | None:
    """The file that `model.weights` means; None: none is asked for.

    With `model.download` what the cache has not got is fetched; HF_HUB_OFFLINE forbids it.

    Raises:
        UserError: huggingface_hub is missing, or the file is not to be had.
    """
    if model.weights is None or not str(model.weights).startswith(HUB):
        return model.weights
    reasons = []
    for name in _WEIGHTS:
        found, reason = _fetched(model, name)
        if found is not None:
            return found
        reasons.append(reason)
    cure = "" if model.download else "; model.download=true fetches it"
    raise UserError(f"model.weights={model.weights} is not in the local cache ({reasons[0]}){cure}")


def weights_preprocessing(model: ModelConfig) -> Preprocessing | None:
    """What `model.weights` expect of images; None: not known.

    Those of the hub's config.json, else timm's of the network's name.
    """
    if model.weights is None:
        return None
    if str(model.weights).startswith(HUB):
        path, _ = _fetched(model, "config.json")
        try:
            config = json.loads(path.read_bytes())["pretrained_cfg"] if path else {}
            mean, std = (tuple(map(float, config[key])) for key in ("mean", "std"))
            return Preprocessing(mean, std, config.get("interpolation"))
        except (KeyError, TypeError, ValueError):
            pass
    return expected_preprocessing(model.name) if model.name.startswith(PREFIX) else None


def _fetched(model: ModelConfig, name: str) -> tuple[Path | None, str]:
    """A file of the repository, or why there is none."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UserError(
            f"model.weights={model.weights} needs huggingface_hub, which timm brings: "
            f"{pip_line('timm')}"
        ) from None
    repository = str(model.weights).removeprefix(HUB)
    try:
        path = hf_hub_download(repository, name, local_files_only=not model.download)
    except Exception as error:  # gated, absent, offline, no network: of many types
        return None, " ".join(str(error).split())[:150] or type(error).__name__
    return Path(path), ""
