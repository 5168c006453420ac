"""A connection between the holders of two pods. Both prove that they know the rendezvous secret, and sign each frame.

A frame is the lengths of a JSON object and of its body, a MAC, the object and the body. The MAC's key is derived from
the secret and a random number of each side, and it covers a direction and a counter: no frame can be repeated, and none
of another connection is accepted.
"""

import asyncio
import hashlib
import hmac
import json
import os
import struct
from typing import Any, Final

_HEAD: Final = struct.Struct("!II")
_MAC_BYTES: Final = 32
_NONCE_BYTES: Final = 16
_MOST_HEADER: Final = 1 << 18
PIECE: Final = 1 << 20
"""Bytes of a frame's body at most."""


class LinkBroken(Exception):
    """The other holder has gone, or is none of this job."""


class Link:
    """One side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, caller: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self._own = b"caller" if caller else b"called"
        self._other = b"called" if caller else b"caller"
        self._sent = 0
        self._received = 0
        self._sending = asyncio.Lock()

    async def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame. Raises: LinkBroken."""
        header = json.dumps(message).encode()
        async with self._sending:
            mac = self._sign(self._own, self._sent, header, body)
            self._sent += 1
            self._writer.write(_HEAD.pack(len(header), len(body)) + mac + header)
            self._writer.write(body)
            try:
                await self._writer.drain()
            except OSError as error:
                raise LinkBroken(str(error)) from error

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next frame. Raises: LinkBroken."""
        try:
            head = await self._reader.readexactly(_HEAD.size + _MAC_BYTES)
            header_size, body_size = _HEAD.unpack(head[: _HEAD.size])
            if header_size > _MOST_HEADER or body_size > (PIECE if self._received else 0):
                raise LinkBroken("a frame is too long")
            header = await self._reader.readexactly(header_size)
            body = await self._reader.readexactly(body_size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LinkBroken(str(error)) from error
        expected = self._sign(self._other, self._received, header, body)
        if not hmac.compare_digest(expected, head[_HEAD.size :]):
            raise LinkBroken("a frame has a wrong signature")
        self._received += 1
        return json.loads(header), body

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    def _sign(self, side: bytes, count: int, header: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d %d " % (side, count, len(header)) + header + body, "sha256")


async def open_link(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, scope: str, *, caller: bool
) -> Link:
    """Exchange random numbers and return the link. ``scope``: the run's id. Raises: LinkBroken."""
    own = os.urandom(_NONCE_BYTES)
    writer.write(own)
    try:
        other = await reader.readexactly(_NONCE_BYTES)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise LinkBroken(str(error)) from error
    first, second = (own, other) if caller else (other, own)
    key = hmac.new(secret.encode(), b"dev " + scope.encode() + first + second, hashlib.sha256).digest()
    return Link(reader, writer, key, caller=caller)
