"""The addresses that this process listens on, from /proc."""

import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listening_addresses() -> list[str]:
    """IP addresses (without ports) of the TCP sockets that this process listens on, sorted."""
    ours = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own descriptor is gone by now
            ours.add(os.readlink(entry))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and f"socket:[{inode}]" in ours:
                found.append(str(_address(local.partition(":")[0])))
    return sorted(found)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # The kernel prints 32-bit words in the machine's byte order.
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    raw = b"".join(words)
    if len(raw) == 16:
        six = ipaddress.IPv6Address(raw)
        return six.ipv4_mapped or six
    return ipaddress.IPv4Address(raw)
