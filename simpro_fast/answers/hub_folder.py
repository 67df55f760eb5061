"""A folder fit for a model hub: weights, descriptions, model card. Nothing is uploaded."""

from __future__ import annotations

from pathlib import Path

from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.model_card import CARD
from simpro_fast.answers.model_file import DESCRIPTION, WEIGHTS, write_weights
from simpro_fast.utils.atomic_write import write_atomically, write_json
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.regular_file import no_file, read_text


def read_card(run: Path) -> str:
    """The model card beside a trained network.

    Raises:
        UserError: there is none.
    """
    path = run / CARD
    if said := no_file(path):
        raise UserError(f"{path}: {said}; every run has a model card, write it anew or train again")
    return read_text(path)


def write_hub_folder(model: TrainedModel, card: str, folder: Path) -> list[Path]:
    """Write what `load_model` reads, `config.json` as hubs show it, and the card.

    Returns:
        the files.

    Raises:
        UserError: one of them cannot be written.
    """
    sha256 = write_weights(folder / WEIGHTS, model.module.state_dict())
    file = model.file.model_copy(update={"weights_sha256": sha256})
    file.write(folder / DESCRIPTION)
    config = {
        "model_type": "simpro_fast",
        "architectures": [file.model.name],
        "image_size": file.image_size,
        "fit": file.fit,
        "interpolation": file.interpolation,
        "num_channels": 3,
        "id2label": {str(k): name for k, name in enumerate(file.class_names)},
        "label2id": {name: k for k, name in enumerate(file.class_names)},
        "image_mean": file.mean,
        "image_std": file.std,
    }
    write_json(folder / "config.json", config)
    write_atomically(folder / CARD, card)
    return [folder / name for name in (WEIGHTS, DESCRIPTION, "config.json", CARD)]
