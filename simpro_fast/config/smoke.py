"""What `--smoke` changes: sizes only, so that the whole of an experiment's code runs in seconds.

Network, method, optimizer, engine, data set and formats stay those of the experiment. The run
directory is `<output_dir>/smoke/<name>/...`, which no real run uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpro_fast.config.load import apply_overrides, parse_config, read_tree
from simpro_fast.config.methods import DEFAULT, method_entry
from simpro_fast.config.schema import Config
from simpro_fast.errors import ConfigError

FOLDER = "smoke"

# Of every experiment: three steps, new priors after the second, evaluation, one checkpoint.
SIZES = (
    *("train.steps=3", "train.period=2", "train.threads=1"),
    *("data.mu=1", "data.labeled_max=2", "data.unlabeled_max=4"),
    "data.test_per_class=1",
    *("evaluate.every=1", "evaluate.batch_size=32", "evaluate.heap_images=32"),
    *(f"log.{logger}=false" for logger in ("figures", "tensorboard", "wandb", "mlflow")),
)
LABELED_PER_RANK = 2
LARGEST_IMAGE = 64


def smoke_sizes(tree: dict[str, Any], world_size: int) -> list[str]:
    """The overrides, as `key.sub=value`, for one experiment.

    Args:
        tree: the experiment as plain data, its own overrides applied.
        world_size: ranks, with two labeled and two unlabeled images each.

    Raises:
        ConfigError: there is no such method.
    """
    sizes = [f"data.batch_size={LABELED_PER_RANK * max(1, world_size)}", *SIZES]
    for key, size in (
        ("optim.warmup_steps", 1),
        ("data.gamma_unlabeled", 2),
        ("data.holdout_per_class", 1),
        ("distributed.micro_batch", 1),
    ):
        if _value(tree, key):
            sizes.append(f"{key}={size}")
    name = _value(tree, "method.name")
    own = method_entry(name if isinstance(name, str) else DEFAULT).keys.smoke
    sizes += [f"method.{key}={value}" for key, value in own.items()]
    if _value(tree, "data.total_max"):
        # A tail that is cut before the labeled share is taken: one labeled image of each class.
        sizes += ["data.total_max=5", "data.gamma_labeled=1"]
    else:
        sizes.append("data.gamma_labeled=2")
    if _can_be_scaled(tree):
        side = _value(tree, "data.image_size")
        if side is None or (isinstance(side, int) and side > LARGEST_IMAGE):
            sizes.append(f"data.image_size={LARGEST_IMAGE}")
    return sizes


def load_smoke_config(
    source: str | Path, overrides: list[str], world_size: int
) -> tuple[Config, list[str]]:
    """The experiment at smoke size; `overrides` of the command line win over the sizes.

    Returns:
        the configuration, named `smoke/<name>`, and what was changed for it, as `key.sub=value`.

    Raises:
        ConfigError: as `load_config`.
    """
    wanted = apply_overrides(read_tree(source), overrides)
    given = {item.partition("=")[0] for item in overrides}
    sizes = [s for s in smoke_sizes(wanted, world_size) if s.partition("=")[0] not in given]
    if isinstance(wanted.get("name"), str):
        sizes.append(f"name={FOLDER}/{wanted['name']}")
    return parse_config(apply_overrides(wanted, sizes)), sizes


def refuse_smoke_folder(config: Config) -> None:
    """A real run must not lie where smoke runs are emptied.

    Raises:
        ConfigError: its name begins with the folder.
    """
    if config.name.split("/")[0] == FOLDER:
        raise ConfigError(
            f"name={config.name}: folders below {FOLDER}/ are emptied by --smoke; "
            "choose another name, or add --smoke"
        )


def _can_be_scaled(tree: dict[str, Any]) -> bool:
    """Published arrays have the size that they have; torchvision's networks may need theirs."""
    data, model = str(_value(tree, "data.name")), str(_value(tree, "model.name"))
    in_files = data == "images" or data.startswith("imagenet_")
    return in_files and not _value(tree, "data.packed") and not model.startswith("torchvision/")


def _value(tree: dict[str, Any], dotted: str) -> Any:
    """What the experiment says; None where it leaves the default, or says nonsense."""
    section, _, key = dotted.partition(".")
    inner = tree.get(section)
    return inner.get(key) if isinstance(inner, dict) else None
