"""One bounded `GET /metrics` to a process on this machine."""

from __future__ import annotations

import asyncio

TIMEOUT_SECONDS = 2.0
SIZE_LIMIT = 1 << 20


async def fetch_page(port: int, *, timeout: float = TIMEOUT_SECONDS, limit: int = SIZE_LIMIT) -> str | None:
    """Return the page at 127.0.0.1:``port``/metrics, or None where there is no sound answer in time and size."""
    try:
        async with asyncio.timeout(timeout):
            return await _fetch(port, limit)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        return None


async def _fetch(port: int, limit: int) -> str | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        # HTTP/1.0: the answer is not chunked and ends with the connection.
        writer.write(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\nAccept: text/plain\r\n\r\n")
        await writer.drain()
        answer = bytearray()
        while part := await reader.read(65536):
            answer += part
            if len(answer) > limit:
                return None
    finally:
        writer.close()
    head, separator, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split()
    if not separator or len(status) < 2 or status[1] != b"200":
        return None
    return body.decode("utf-8", "replace")
