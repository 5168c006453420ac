"""The listening TCP sockets of processes, as /proc has them."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"


def list_family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    family = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in file.read_text().split():
                family += list_family(int(child))
    return family


def list_listeners(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return address and port of each socket on which one of these processes listens."""
    inodes = {inode for pid in pids for inode in _list_sockets(pid)}
    return sorted((address, port) for inode, address, port in _list_all() if inode in inodes)


def is_loopback(address: str) -> bool:
    """Return whether an address is of the loopback interface."""
    return ipaddress.ip_address(address).is_loopback


def _list_sockets(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _list_all() -> Iterator[tuple[str, str, int]]:
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            row = line.split()
            address, port = row[1].split(":")
            if row[3] == _LISTENING:
                yield row[9], socket.inet_ntop(family, _decode_address(address)), int(port, 16)


def _decode_address(text: str) -> bytes:
    """Decode an address, whose 32-bit words /proc prints in the byte order of the machine."""
    words = [int(text[place : place + 8], 16) for place in range(0, len(text), 8)]
    return struct.pack(f"={len(words)}I", *words)
