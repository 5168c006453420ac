"""The requester's side of a fork server: of the launcher, which starts it, and of an agent for its ranks."""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..base.files import BOOTSTRAP
from ..contract.frames import send_with_descriptors
from .frames import encode

_kept: list[tuple[int, socket.socket]] = []  # the server that was forked with this launcher, until it is used


class ServerStart(NamedTuple):
    """What a server that is forked with its launcher has to know. ``worker``: see ``start_fork_server``."""

    worker: list[str]
    environment: dict[str, str]
    folder: str


def start_fork_server(worker: Sequence[str]) -> tuple[int, socket.socket]:
    """Start a server. Returns its process id and the socket for requests.

    ``worker``: the arguments of a rank's shim. If empty, the server forks no ranks and becomes the first agent.
    """
    if _kept:
        return _wake_kept(worker)
    requests, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    command = [sys.executable, "-u", BOOTSTRAP, "forkserver", str(theirs.fileno()), str(os.getpid()), *worker]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    theirs.close()
    return pid, requests


def _wake_kept(worker: Sequence[str]) -> tuple[int, socket.socket]:
    """Start the server that was forked with this launcher."""
    pid, requests = _kept.pop()
    with suppress(OSError):  # it has ended: the first request fails as well
        requests.sendall(encode(ServerStart(list(worker), dict(os.environ), os.getcwd())))
    return pid, requests


def request_fork(requests: socket.socket, request: object, descriptors: Sequence[int]) -> None:
    """Send a server a request. Raises: OSError when the server has ended."""
    send_with_descriptors(requests, encode(request), descriptors)


def keep_server(pid: int, requests: socket.socket) -> None:
    """Keep a server that was forked with this launcher for its first request."""
    _kept.append((pid, requests))
