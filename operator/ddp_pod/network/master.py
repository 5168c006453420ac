"""The port of pod 0: the wait until it serves the rendezvous, and its connections."""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from ..base.files import log
from ..contract.failure_text import UNRESOLVED
from ..failures.text import REFUSED

TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
"""The connections of this machine (Linux)."""
_SECONDS_TO_LISTEN: Final = 30.0  # which pod 0 may take to import PyTorch before it hosts the store


class MasterChecked(NamedTuple):
    """An attempt to reach pod 0. ``problem``: None if it is reachable."""

    problem: str | None


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


def count_connections(port: int, address: str = "") -> int:
    """Return how many established TCP connections this machine has at a local port (Linux).

    ``address``: of this machine, IPv4; if empty, any.
    """
    own = socket.inet_aton(address)[::-1].hex().upper() if address else ""
    count = 0
    for path in TABLES:
        with suppress(OSError), open(path, encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
            count += sum(row[3] == "01" and row[1].endswith(f"{own}:{port:04X}") for row in rows)
    return count
