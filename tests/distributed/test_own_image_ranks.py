"""Two gloo ranks on a user's own images: damage, too few images, other files on another machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simpro_fast.config import Config, parse_config
from simpro_fast.data.files.scan_shards import scan_shard
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError
from tests.data.image_folders import tidy
from tests.data.tar_shards import as_shards
from tests.distributed.gloo_ranks import run_ranks
from tests.distributed.rank_runs import dump, mean_losses, on_ranks, start, train
from tests.equality import assert_close

MakeConfig = Callable[..., Config]
OWN = {
    **{"data.name": "images", "data.image_size": 16, "data.batch_size": 4, "data.mu": 2},
    "model.activation": "silu",
}


def test_ranks_replace_a_damaged_member_as_one_does(tiny: MakeConfig, tmp_path: Path) -> None:
    """From shards, with a damaged image that only some ranks draw."""
    tars = as_shards(tidy(tmp_path / "data"), tmp_path / "tars")
    row = scan_shard(str(tars / "unlabeled-001.tar"), "unlabeled", Ignored())[3]
    with (tars / "unlabeled-001.tar").open("r+b") as file:
        file.seek(row.offset + row.bytes // 2)
        file.write(bytes(row.bytes - row.bytes // 2))
    paths = {f"data.{part}": f"{tars}/{part}-*.tar" for part in ("labeled", "unlabeled", "val")}
    more = {"data.on_bad_image": "skip", "train.precision": "fp64"}
    tree = dump(tiny({**OWN, **paths, **more}))
    (one,) = on_ranks(1, train, tree, 6)
    two = on_ranks(2, train, tree, 6)
    assert two[0]["equal"]
    assert_close(mean_losses(two), one["losses"], 1e-10)


def _refusal(rank: int, world_size: int, tree: dict[str, Any], folder: str) -> str:
    before = os.getcwd()
    os.chdir(folder.format(rank=rank))
    try:
        config = parse_config(tree)
        Trainer(config, start(config, rank, world_size))
    except UserError as error:
        return str(error)
    finally:
        os.chdir(before)
    return "no error"


def test_more_ranks_than_images_is_one_line_on_every_rank(tiny: MakeConfig, tmp_path: Path) -> None:
    tidy(tmp_path, unlabeled=1)
    tree = dump(tiny({**OWN, "data.labeled": "labeled", "data.unlabeled": "unlabeled"}))
    for said in run_ranks(_refusal, tree, str(tmp_path)):
        assert "1 unlabeled images cannot be shared by 2 ranks" in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("change", ["missing", "other"])
def test_other_files_on_another_machine_are_noticed(
    tiny: MakeConfig, tmp_path: Path, change: str
) -> None:
    """The same configuration, another list on rank 1."""
    for rank in range(2):
        tidy(tmp_path / f"{rank}")
    victim = tmp_path / "1/unlabeled/003.jpg"
    if change == "missing":
        victim.unlink()
    else:
        victim.rename(victim.with_name("new.jpg"))
    tree = dump(tiny({**OWN, "data.labeled": "labeled", "data.unlabeled": "unlabeled"}))
    for said in run_ranks(_refusal, tree, f"{tmp_path}/{{rank}}"):
        assert "rank 1" in said and "data" in said and len(said.splitlines()) == 1, said
