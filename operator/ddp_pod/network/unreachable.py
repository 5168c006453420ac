"""Peers that this pod cannot reach: pod 0 before training, and peers that stop acknowledging data (Linux)."""

import errno
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from ..base.files import log
from ..base.pod import Pod
from ..base.service import Service
from ..contract.failure_text import UNRESOLVED
from ..contract.processes import find_family
from ..failures.text import REFUSED

_SECONDS_TO_LISTEN: Final = 30.0  # which pod 0 may take to import PyTorch before it hosts the store
_INTERVAL: Final = 5.0
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_MOST_BYTES: Final = 4 << 20
_TEXT_LIMIT: Final = 300
_ESTABLISHED: Final = 0x01
_CONNECTING: Final = 0x02
# The kernel waits twice as long after each retransmission, 0.2 s after the first: five of them take six seconds.
_RETRANSMISSIONS: Final = 5
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
T = TypeVar("T")


def wait_for_master(
    host: str, port: int | None, timeout: float, report: Callable[[str | None], None] = lambda problem: None
) -> str | None:
    """Wait until ``host`` resolves and, with a port, accepts a connection. Returns None, or the problem at the end.

    ``report`` gets each change of the problem, and None when it is over. A pod 0 that refuses connections is reachable
    and may still start: that is no problem for the first 30 seconds.
    """
    start = time.monotonic()
    pause = 0.01
    next_log = 3.0
    logged = False
    reported: str | None = None
    target = host if port is None else f"{host}:{port}"
    while True:
        problem = _probe(host, port)
        waited = time.monotonic() - start
        if problem is None:
            if logged:
                log(f"{target} is reachable after {waited:.1f} s")
            if reported is not None:
                report(None)
            return None
        if waited >= timeout:
            return problem
        if waited >= next_log:
            log(f"waiting for master {target} ({problem}); {timeout - waited:.0f} s left")
            is_starting = problem.startswith(REFUSED) and waited < _SECONDS_TO_LISTEN
            current = None if is_starting else problem
            if current != reported:
                report(current)
                reported = current
            next_log = waited + max(5.0, min(60.0, waited))
            logged = True
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)


def _probe(host: str, port: int | None) -> str | None:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return UNRESOLVED
    if port is None:
        return None
    problem = ""
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(2)
            try:
                connection.connect(address)
            except OSError as error:
                refused = error.errno == errno.ECONNREFUSED
                problem = f"no connection to {address[0]}: {error.strerror or error}"
                if refused:
                    problem = f"{REFUSED} ({address[0]})"
            else:
                return None
    return problem


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


def _list_rows(table: str) -> Iterator[list[str]]:
    """Yield the columns of the connections in a table."""
    for line in table.splitlines()[1:]:
        columns = line.split()
        if len(columns) >= 10:
            yield columns


def _search_tables(find: Callable[[str], Iterator[T]]) -> list[T]:
    """Return the matches in the tables of this machine, without those that cannot be read."""
    found: list[T] = []
    for path in _TABLES:
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


def _list_sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets of a process and its descendants."""
    inodes = set()
    for member in find_family(pid):
        folder = f"/proc/{member}/fd"
        try:
            descriptors = os.listdir(folder)
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                match = _SOCKET.fullmatch(os.readlink(f"{folder}/{descriptor}"))
            except OSError:
                continue
            if match:
                inodes.add(int(match[1]))
    return inodes


def count_connections(port: int, address: str = "") -> int:
    """Return how many established TCP connections this machine has at a local port (Linux).

    ``address``: of this machine, IPv4; if empty, any.
    """
    own = socket.inet_aton(address)[::-1].hex().upper() if address else ""
    count = 0
    for path in _TABLES:
        with suppress(OSError), open(path, encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
            count += sum(row[3] == "01" and row[1].endswith(f"{own}:{port:04X}") for row in rows)
    return count


class MasterChecked(NamedTuple):
    """An attempt to reach pod 0. ``problem``: None if it is reachable."""

    problem: str | None


class UnreachablePeers(Service):
    """Reports unreachable peers to the operator and in the pod's log."""

    name = "unreachable peers"

    def __init__(self, pod: Pod, reader: object = None) -> None:
        self._pod = pod
        self._master_problem = ""
        self._peer_problem = ""

    def note(self, event: object) -> None:
        """Record the result of an attempt to reach pod 0."""
        if not isinstance(event, MasterChecked):
            return
        problem = event.problem
        target = self._pod.master if self._pod.node == 0 else f"{self._pod.master}:{self._pod.port}"
        self._master_problem = f"cannot reach pod 0 at {target}: {problem}" if problem else ""

    def report(self) -> Mapping[str, object]:
        """Return what the pod cannot reach; empty if it reaches everything."""
        return {"unreachable": (self._master_problem or self._peer_problem)[:_TEXT_LIMIT]}

    def run(self) -> None:
        """Check the connections of the ranks and the agent continuously, if this pod has peers."""
        while self._pod.is_multi_node:
            time.sleep(_INTERVAL)
            self.check(list_unacknowledged())

    def check(self, connections: list[Connection]) -> None:
        """Record the connections that wait for an acknowledgement now."""
        addresses = sorted({connection.address for connection in connections})
        problem = ""
        if addresses:
            problem = _describe_silence(addresses)
        if problem and not self._peer_problem:
            log(f"{problem}: the network drops packets, or its machine is lost")
        elif self._peer_problem and not problem:
            log("all peers acknowledge data again")
        self._peer_problem = problem


def _describe_silence(addresses: Sequence[str]) -> str:
    first = addresses[0]
    others = len(addresses) - 1
    if not others:
        return f"{first} does not acknowledge data"
    return f"{first} and {others} more address{'es' if others > 1 else ''} do not acknowledge data"
