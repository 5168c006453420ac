"""Messages between the processes of this package in one pod: pickled objects with their length in front."""

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


def encode(message: object) -> bytes:
    """Return a message with its length in front."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Any:
    """Return the message in the result of ``read_frame``."""
    return pickle.loads(data)  # noqa: S301


def decode_all(data: bytes) -> tuple[list[Any], bytes]:
    """Return the complete messages at the beginning, and the rest."""
    messages = []
    while len(data) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if len(data) < end:
            break
        messages.append(decode(data[_LENGTH.size : end]))
        data = data[end:]
    return messages, data


def read_frame(channel: socket.socket) -> bytes:
    """Return the next message of a blocking socket, encoded. Raises: EOFError if its other end is closed."""
    head = _read(channel, _LENGTH.size)
    return _read(channel, _LENGTH.unpack(head)[0])


def _read(channel: socket.socket, size: int) -> bytes:
    data = channel.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data
