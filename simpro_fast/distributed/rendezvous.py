"""How the ranks of a run find each other: one store, opened by rank 0 on one address only.

torch's own store listens on every interface of the machine whatever address it is given, and
whoever reaches it may write into it. Here rank 0 binds the socket and hands it over. `torchrun`
opens the store in its agent, before any rank exists, so there it listens as torchrun pleases.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.machine import host_name

HANDSHAKE_TIMEOUT = 30.0
"""Seconds that whatever has the port may take to prove that it is a store."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet.

    Args:
        listen: address that rank 0 binds instead of `address`.
        timeout: seconds until a rank that has not come is named.
    """

    rank: int
    world_size: int
    several_hosts: bool
    address: str
    port: int
    listen: str | None
    timeout: float

    def open_store(self) -> dist.Store:
        """Rank 0 opens the store, the others connect to it.

        Raises:
            ConfigError: an impossible address or port.
            UserError: the port is taken, or nobody is there in time.
        """
        if self.port == 0:
            raise ConfigError(
                "MASTER_PORT=0: several ranks cannot agree on a port that is chosen later; "
                "use torchrun --standalone on one machine, or give a fixed --master-port"
            )
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        descriptor = self._listen() if self.rank == 0 and not agent else None
        if descriptor is None:
            self._await_port()
        store = self._connect() if descriptor is None else self._store(descriptor)
        store.set_timeout(timedelta(seconds=self.timeout))
        if agent:
            # The agent's store outlives a restart of its ranks, so each attempt has its own keys.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt_{attempt}", store)
        return store

    def _store(self, descriptor: int | None) -> dist.Store:
        return dist.TCPStore(
            self.address,
            self.port,
            self.world_size,
            is_master=descriptor is not None,
            timeout=timedelta(seconds=min(self.timeout, HANDSHAKE_TIMEOUT)),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    def _connect(self) -> dist.Store:
        """A client of rank 0's store. In a thread, since torch waits for ever for a silent peer."""
        result: list[dist.Store | dist.DistError] = []

        def connect() -> None:
            try:
                result.append(self._store(None))
            except dist.DistError as error:
                result.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        with _quiet_stderr():
            thread.start()
            thread.join(min(self.timeout, HANDSHAKE_TIMEOUT) + 1)
        answer = result[0] if result else TimeoutError("no answer")
        if isinstance(answer, Exception):
            raise UserError(
                f"rank {self.rank} cannot use what listens at {self.address}:{self.port} "
                f"({str(answer).splitlines()[0]}); another program has this port, choose another"
            )
        return answer

    def _listen(self) -> int:
        """File descriptor of a socket that listens on our address only."""
        address = self.listen or self.address
        try:
            found = socket.getaddrinfo(address, self.port, type=socket.SOCK_STREAM)
            family, bound = found[0][0], str(found[0][4][0])
            self._refuse_loopback_name(address, bound)
            server = socket.create_server((bound, self.port), family=family, backlog=4096)
        except OSError as error:
            raise UserError(
                f"rank 0 cannot listen on {address}:{self.port}: {_cure(error)}"
            ) from None
        return server.detach()

    def _refuse_loopback_name(self, address: str, bound: str) -> None:
        """Many machines map their own name to 127.0.1.1, where no other host can reach them."""
        if not self.several_hosts or not ipaddress.ip_address(bound).is_loopback:
            return
        if address in ("localhost", bound):
            return  # two launchers on one machine; said in so many words
        raise UserError(
            f"MASTER_ADDR={address} is {bound} on its own host, where other hosts cannot reach it; "
            "use the IP address that the other hosts see, or distributed.listen=0.0.0.0"
        )

    def _await_port(self) -> None:
        """Return once somebody listens. torch would wait too, but with a traceback per second."""
        deadline, pause = time.monotonic() + self.timeout, 0.05
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"rank {self.rank} of {self.world_size} on {host_name()} found no rank 0 "
                        f"at {self.address}:{self.port} within {self.timeout:g} s "
                        f"({error.strerror or error}); is rank 0 running, is the address right, "
                        "does a firewall stand between?"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Without torch's C++ traceback for every failed try; the last failure is an exception."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def wait_for_key(store: dist.Store, key: str, deadline: float) -> bool:
    """Whether `key` appears before `deadline` (of `time.monotonic`).

    Asked again and again, since torch's own wait prints a traceback when it runs out.

    Raises:
        UserError: the process that holds the store is gone.
    """
    pause = 0.01
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
    except dist.DistError:
        raise UserError(
            "rank 0 (or torchrun's agent) ended during the start; see its error"
        ) from None
    return True


def interface_towards(address: str, port: int) -> str | None:
    """Name of the network interface whose address this machine uses to talk to `address`.

    None where it cannot be told. Nothing is sent.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            mine = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except (OSError, ValueError):
        return None
    if mine.is_loopback:
        return "lo"
    addresses = psutil.net_if_addrs().items()
    owners = {one.address.partition("%")[0]: name for name, all_ in addresses for one in all_}
    return owners.get(str(mine))


def _cure(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            "the port is taken, perhaps by another run; choose another one "
            "(deepspeed --master_port N, torchrun --master-port N, or MASTER_PORT)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"no address of this host ({host_name()}); rank 0 must run where MASTER_ADDR points, "
            "or set distributed.listen to an address of this host (0.0.0.0 for all)"
        )
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges; choose a higher one"
    return f"{error.strerror or error}; check MASTER_ADDR"
