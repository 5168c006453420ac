"""The order to start a pod that `ddp` sends a server of the launcher, which has imported PyTorch."""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

SERVER_COMMAND: Final = "podserver"  # the launcher's subcommand
DESCRIPTORS: Final = 3  # of an order: the pod's output, the pipe for its process id, and the lifeline
_LENGTH: Final = struct.Struct("!I")


class PodStart(NamedTuple):
    """A pod to start. ``arguments``: those of the launcher, from ``run`` on; ``folder``: its working directory."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str


def send_start(orders: socket.socket, start: PodStart, descriptors: Sequence[int]) -> None:
    """Send an order with its file descriptors. Raises: OSError, if the server has ended."""
    data = json.dumps(start._asdict()).encode()
    socket.send_fds(orders, [b"\0"], descriptors)
    orders.sendall(_LENGTH.pack(len(data)) + data)


def receive_start(orders: socket.socket) -> tuple[PodStart, list[int]] | None:
    """Return the next order and its file descriptors; None: there will be none."""
    mark, descriptors, _, _ = socket.recv_fds(orders, 1, DESCRIPTORS)
    if not mark:
        return None
    size = _LENGTH.unpack(_read(orders, _LENGTH.size))[0]
    return PodStart(**json.loads(_read(orders, size))), descriptors


def _read(orders: socket.socket, size: int) -> bytes:
    data = orders.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data
