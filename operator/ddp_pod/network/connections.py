"""The connections of this pod whose peers do not acknowledge data, and those to a port (Linux)."""

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from ..contract.processes import find_family
from .master import TABLES

_MOST_BYTES: Final = 4 << 20
_ESTABLISHED: Final = 0x01
_CONNECTING: Final = 0x02
# The kernel waits twice as long after each retransmission, 0.2 s after the first: five of them take six seconds.
_RETRANSMISSIONS: Final = 5
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
T = TypeVar("T")


class Connection(NamedTuple):
    """A TCP connection whose peer does not acknowledge data from this machine."""

    address: str
    inode: int
    port: int = 0


def find_unacknowledged(table: str) -> Iterator[Connection]:
    """Yield the connections in the text of ``/proc/net/tcp`` that wait for an acknowledgement (proc(5))."""
    for columns in _list_rows(table):
        queue, _, _ = columns[4].partition(":")
        is_open = int(columns[3], 16) in (_ESTABLISHED, _CONNECTING)
        if is_open and int(queue, 16) and int(columns[6], 16) >= _RETRANSMISSIONS:
            address, _, port = columns[2].partition(":")
            yield Connection(_decode_address(address), int(columns[9]), int(port, 16))


def find_servers(table: str, port: int) -> Iterator[str]:
    """Yield the addresses to whose ``port`` connections of the text of ``/proc/net/tcp`` are established."""
    for columns in _list_rows(table):
        address, _, remote_port = columns[2].partition(":")
        if int(columns[3], 16) == _ESTABLISHED and int(remote_port, 16) == port:
            yield _decode_address(address)


def list_servers(port: int) -> set[str]:
    """Return the addresses to whose ``port`` this pod has connections."""
    return set(_search_tables(partial(find_servers, port=port)))


def find_peer(descriptor: str) -> str:
    """Return the other end of a connection of this pod as ``host:port``; empty: unknown.

    ``descriptor``: what a file descriptor of one of its processes refers to, as ``socket:[123]``.
    """
    inode = _SOCKET.fullmatch(descriptor)
    peers = _search_tables(partial(_find_addresses, inode=inode[1])) if inode else []
    return next(iter(peers), "")


def _find_addresses(table: str, inode: str) -> Iterator[str]:
    for columns in _list_rows(table):
        if columns[9] == inode:
            address, _, port = columns[2].partition(":")
            host = _decode_address(address)
            yield f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"


def _list_rows(table: str) -> Iterator[list[str]]:
    """Yield the columns of the connections in a table."""
    for line in table.splitlines()[1:]:
        columns = line.split()
        if len(columns) >= 10:
            yield columns


def _search_tables(find: Callable[[str], Iterator[T]]) -> list[T]:
    """Return the matches in the tables of this machine, without those that cannot be read."""
    found: list[T] = []
    for path in TABLES:
        with suppress(OSError, ValueError), open(path, encoding="ascii", errors="replace") as file:
            found += find(file.read(_MOST_BYTES))
    return found


def _decode_address(text: str) -> str:
    """Return an address that the kernel prints as hexadecimal words in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).replace("::ffff:", "")


def list_unacknowledged() -> list[Connection]:
    """Return the connections of this process and its descendants that wait for an acknowledgement."""
    connections = _search_tables(find_unacknowledged)
    if not connections:
        return []
    own = _list_sockets(os.getpid())  # the table has those of the pod's other containers too
    return [connection for connection in connections if connection.inode in own]


def list_outer_sockets(pids: Sequence[int]) -> set[int] | None:
    """Return the inodes of processes' TCP connections that leave this pod; None: they are unknown."""
    rows = _search_tables(_list_rows)
    hosts = {columns[1].partition(":")[0] for columns in rows}
    outer = {
        int(columns[9])
        for columns in rows
        if int(columns[3], 16) == _ESTABLISHED and columns[2].partition(":")[0] not in hosts
    }
    inodes: set[int] = set()
    for pid in pids:
        if not os.access(f"/proc/{pid}/fd", os.R_OK):
            return None
        inodes |= _list_own_sockets(pid)
    return outer & inodes


def _list_sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets of a process and its descendants."""
    return {inode for member in find_family(pid) for inode in _list_own_sockets(member)}


def _list_own_sockets(pid: int) -> set[int]:
    inodes = set()
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return set()
    for descriptor in descriptors:
        try:
            match = _SOCKET.fullmatch(os.readlink(f"{folder}/{descriptor}"))
        except OSError:
            continue
        if match:
            inodes.add(int(match[1]))
    return inodes
