"""Two nodes in two network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.conftest import TINY, TRAIN
from tests.processes import PATIENCE, clean_environment

DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")
TIMEOUT = 240
HOSTS = ("simpro-a", "simpro-b")
NAMESPACES = tuple(f"{host}-{os.getpid()}" for host in HOSTS)
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=PATIENCE)


@contextmanager
def _namespaces() -> Iterator[None]:
    """Two hosts with an interface each and a cable between them.

    Skips the test, with the reason, where this may not be done.
    """
    if not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("network namespaces need the commands ip and unshare")
    try:
        for name in NAMESPACES:
            _ip("netns", "add", name)
        first, second = NAMESPACES
        link = ["link", "add", "net0", "netns", first, "type", "veth", "peer", "name", "net0"]
        _ip(*link, "netns", second)
        for name, address in zip(NAMESPACES, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "net0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "net0", "up")
    except subprocess.CalledProcessError as error:
        _remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        yield
    finally:
        _remove()


def _remove() -> None:
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=PATIENCE)


def _enter(namespace: str, host: str) -> list[str]:
    renamed = f'hostname {host} && exec "$0" "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", renamed]


def _launch(
    folder: Path,
    address: str,
    port: int,
    entered: list[list[str]],
    *options: str,
    launched: bool = True,
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of both nodes' launchers, else of the ranks themselves."""
    (folder / "hostfile").write_text("node-a slots=1\nnode-b slots=1\n")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    nodes = []
    for rank, inside in enumerate(entered):
        where = ["--hostfile", "hostfile", "--no_ssh", "--node_rank", str(rank)]
        rendezvous = ["--master_addr", address, "--master_port", str(port)]
        train = [TRAIN, "--config", "tiny.yaml", "train.steps=5", *options]
        alone = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        alone |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        if launched:
            train, alone = [DEEPSPEED, *where, *rendezvous, *train], {}
        else:
            train = [sys.executable, *train]
        nodes.append(
            subprocess.Popen(
                [*inside, *train],
                cwd=folder,
                env={**clean_environment(), **{k: str(v) for k, v in alone.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [node.communicate(timeout=TIMEOUT) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(n.returncode, out, err) for n, (out, err) in zip(nodes, outputs, strict=True)]


def _check(folder: Path, nodes: list[tuple[int, str, str]]) -> None:
    assert [code for code, _, _ in nodes] == [0, 0], nodes
    assert "global batch 8 labeled + 16 unlabeled images per step; per rank 4 + 8" in nodes[0][1]
    assert "tiny: SimPro" in nodes[0][1]
    assert "tiny: SimPro" not in nodes[1][1], "rank 0 speaks for all"
    assert (folder / "runs/tiny/seed1/summary.json").is_file()


@pytest.mark.slow  # two ranks meet by torchrun's variables in test_launch
@pytest.mark.parametrize("launched", [False, True])
def test_two_namespaces(tmp_path: Path, launched: bool) -> None:
    """Each node has only its own address, and a name that nobody can resolve."""
    with _namespaces():
        entered = [_enter(name, host) for name, host in zip(NAMESPACES, HOSTS, strict=True)]
        expected = "distributed.expect_world_size=2"
        nodes = _launch(tmp_path, ADDRESSES[0], 29500, entered, expected, launched=launched)
    _check(tmp_path, nodes)
    assert "2 rank(s) on 2 host(s): simpro-a x1, simpro-b x1" in nodes[0][1]
