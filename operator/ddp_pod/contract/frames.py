"""Messages on a stream socket: bytes with their length in front, some of them with file descriptors."""

import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

LENGTH: Final = struct.Struct("!I")
_LIMIT: Final = (1 << 32) - 1


class Delivery(NamedTuple):
    """A message that came with file descriptors."""

    data: bytes
    descriptors: list[int]


def pack(data: bytes) -> bytes:
    """Return a message with its length in front."""
    return LENGTH.pack(len(data)) + data


def read_frame(channel: socket.socket, limit: int = _LIMIT) -> bytes:
    """Return the next message of a blocking socket, of a longer one ``limit`` bytes.

    Raises: EOFError if its other end is closed.
    """
    head = _read(channel, LENGTH.size)
    return _read(channel, min(limit, LENGTH.unpack(head)[0]))


def send_with_descriptors(channel: socket.socket, frame: bytes, descriptors: Sequence[int]) -> None:
    """Send a message that has its length in front. Raises: OSError if the other end is closed."""
    socket.send_fds(channel, [b"\0"], descriptors)
    channel.sendall(frame)


def receive_with_descriptors(channel: socket.socket, most: int, limit: int = _LIMIT) -> Delivery | None:
    """Return the next message and at most ``most`` descriptors, see ``read_frame``; None: the other end is closed."""
    mark, descriptors, _, _ = socket.recv_fds(channel, 1, most)
    return Delivery(read_frame(channel, limit), descriptors) if mark else None


def _read(channel: socket.socket, size: int) -> bytes:
    data = channel.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data
