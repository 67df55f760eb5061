"""Wrong launches end before the first step: in bounded time, in one line, with both values."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from simpro_fast.config import Config, parse_config
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.distributed import consistency
from simpro_fast.distributed.consistency import difference
from simpro_fast.distributed.process_group import Ranks, start_ranks, stop_ranks
from simpro_fast.utils import provenance
from simpro_fast.utils.errors import UserError
from tests.conftest import TINY
from tests.data.cifar_format import cifar10_members, write_archive
from tests.distributed.gloo_ranks import GlooRanks, run_ranks
from tests.distributed.listening import listening_addresses
from tests.processes import free_port

Run = Callable[..., "CompletedProcess[str]"]
BIN = Path(sys.executable).parent


def _start(rank: int, world_size: int, tree: dict[str, Any], **environment: str) -> Ranks:
    """`start_ranks` as under a launcher."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        **environment,
    )
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return start_ranks(parse_config(tree))


def _error(rank: int, world_size: int, tree: dict[str, Any], port: int, **more: str) -> str:
    try:
        _start(rank, world_size, tree, MASTER_PORT=str(port), **more)
    except UserError as error:
        return str(error)
    finally:
        stop_ranks()
    return "no error"


def _changed(tree: dict[str, Any], section: str, **keys: Any) -> dict[str, Any]:
    return {**tree, section: {**tree[section], **keys}}


def _scenarios(rank: int, world_size: int, tree: dict[str, Any], ports: list[int]) -> Any:
    """One process start for all of them: each has a rendezvous port of its own."""
    dist.destroy_process_group()  # the one of GlooRanks, which asks no launcher
    found: dict[str, Any] = {}
    hasty = _changed(tree, "distributed", start_timeout=1.0)

    ranks = _start(rank, world_size, tree, MASTER_PORT=str(ports[0]))
    found["addresses"], found["hosts"] = listening_addresses(), ranks.hosts
    found["bytes"] = ranks.gather_bytes(b"x" * (rank + 1))
    facts = {"split": f"hash{rank}"}
    try:
        ranks.agree_on(facts)
    except UserError as error:
        found["split"] = str(error)
    stop_ranks()

    other = {**_changed(tree, "optim", lr=0.1), "seed": 7} if rank else tree
    found["configuration"] = _error(rank, world_size, other, ports[1])

    honest = provenance.version_of, consistency.source_digest
    if rank:
        provenance.version_of = lambda *names: "0.0.1" if names == ("numpy",) else "1"
    found["versions"] = _error(rank, world_size, tree, ports[2])
    provenance.version_of = honest[0]
    if rank:
        consistency.source_digest = lambda: "f" * 64
    found["code"] = _error(rank, world_size, tree, ports[3])
    consistency.source_digest = honest[1]

    if rank == 0:  # rank 1 never comes
        found["alone"] = _error(rank, world_size, hasty, ports[4])
    else:  # rank 0 never comes
        found["alone"] = _error(rank, world_size, hasty, ports[5])

    if rank == 0:
        with socket.create_server(("127.0.0.1", ports[6])):
            found["taken"] = _error(rank, world_size, hasty, ports[6])
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    tree = parse_config(TINY).model_dump(mode="json")
    ports = [free_port() for _ in range(7)]
    ranks = GlooRanks(2)  # not the shared ones: these leave their process group
    try:
        return ranks.run(_scenarios, tree, ports)
    finally:
        ranks.close()


def test_gloo_listens_on_the_given_address_only(results: list[dict[str, Any]]) -> None:
    assert set(results[1]["addresses"]) == {"127.0.0.1"}


def test_rank_0_knows_the_hosts_and_bytes_of_any_length_travel(
    results: list[dict[str, Any]],
) -> None:
    assert results[0]["hosts"] == ((socket.gethostname(), 2),)
    assert results[0]["bytes"] == results[1]["bytes"] == [b"x", b"xx"]


@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        ("split", ["split hash1 against hash0"]),
        ("configuration", ["optim.lr 0.1 against 0.05", "seed 7 against 1"]),
        ("versions", ["numpy 0.0.1 against ", "Triton 1 against "]),
        ("code", ["code ffffffffffff", "against"]),
    ],
)
def test_ranks_that_differ_are_named_with_both_values(
    results: list[dict[str, Any]], scenario: str, parts: list[str]
) -> None:
    for result in results:
        message = result[scenario]
        host = socket.gethostname()
        assert f"rank 1 on {host} differs from rank 0 on {host}: " in message
        for part in parts:
            assert part in message
        assert "\n" not in message


def test_a_rank_that_never_comes_and_a_taken_port_are_one_line(
    results: list[dict[str, Any]],
) -> None:
    said = [results[0]["alone"], results[1]["alone"], results[0]["taken"]]
    for rank, message in zip((0, 1, 0), said, strict=True):
        assert message.startswith(f"rank {rank} of WORLD_SIZE=2 on ")
        assert "MASTER_ADDR=127.0.0.1" in message and "\n" not in message


def test_the_commit_alone_makes_no_difference() -> None:
    """A node without git, or with another clone of the same files, runs the same code."""
    here = {"host": "a", "code": "123456 (commit abc)"}
    assert difference([here, {"host": "b", "code": "123456"}]) is None
    many = [here, {"host": "b", "code": "1"}, {"host": "c", "code": "2"}]
    assert "rank 1 on b (and 1 more ranks)" in str(difference(many))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.mark.slow
def test_two_ranks_meet_at_the_store_of_torchrun(train_command: Run, config_file: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone"]
    done = train_command("--config", str(config_file), "train.steps=5", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert f"2 rank(s) on 1 host(s): {socket.gethostname()} x2" in done.stdout
    assert "global batch 8 labeled + 16 unlabeled images per step; per rank 4 + 8" in done.stdout


def _load_together(rank: int, world_size: int, root: str) -> list[str]:
    config = parse_config(_changed(TINY, "data", name="cifar10", root=root))
    digests = []
    for _ in range(20):
        dist.barrier()
        digests.append(load_dataset(config.data).fingerprint())
    return [*digests, *(path.name for path in Path(root).iterdir())]


def test_all_ranks_read_one_archive_at_once(tmp_path: Path) -> None:
    """A fresh machine, 4 processes, 20 times; nothing is unpacked half-way."""
    members = cifar10_members()
    write_archive(tmp_path, "cifar-10-python.tar.gz", "cifar-10-batches-py", members)
    found = run_ranks(_load_together, str(tmp_path), world_size=4)
    assert {*itertools.chain(*found)} == {found[0][0], "cifar-10-python.tar.gz"}


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["WORLD_SIZE=2", "MASTER_ADDR"]),
        ({"WORLD_SIZE": "2", "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE='two'"]),
    ],
)
def test_impossible_environment(
    tiny: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    parts: list[str],
) -> None:
    from simpro_fast.distributed.environment import check_launch

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        check_launch(tiny())
        start_ranks(tiny())
    for part in parts:
        assert part in str(caught.value)
