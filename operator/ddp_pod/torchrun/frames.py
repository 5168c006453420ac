"""Messages between the processes of this package in one pod: pickled objects with their length in front."""

import pickle
from typing import Any

from ..contract.frames import LENGTH, pack


def encode(message: object) -> bytes:
    """Return a message with its length in front."""
    return pack(pickle.dumps(message))


def decode(data: bytes) -> Any:
    """Return the message in the result of ``contract.frames.read_frame``."""
    return pickle.loads(data)  # noqa: S301


def decode_all(data: bytes) -> tuple[list[Any], bytes]:
    """Return the complete messages at the beginning, and the rest."""
    messages = []
    while len(data) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        if len(data) < end:
            break
        messages.append(decode(data[LENGTH.size : end]))
        data = data[end:]
    return messages, data
