"""Read the report and other pages of a training pod within limits.

The pod runs code of users. A request is plain HTTP/1.0 without credentials, cookies, redirects and compression, and its
time and size are bounded.
"""

import asyncio
import re
from typing import Final
from weakref import WeakValueDictionary

from ddp_pod.contract.run_report import REPORT_LIMIT

TIMEOUT: Final = 2.0
CONNECTIONS: Final = 256
"""Reports that are read concurrently."""
CONNECTIONS_OF_NAMESPACE: Final = 16
"""Reports of one namespace that are read concurrently."""
_HEAD_LIMIT: Final = 1 << 14
_CHUNK: Final = 1 << 16
STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,9})", re.IGNORECASE)


class Scraper:
    """Reads reports. Each namespace has a share of the connections."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(CONNECTIONS)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, address: str, port: int, namespace: str = "") -> bytes | None:
        """Return the report of a pod of a namespace, as ``fetch_report`` does."""
        share = self._shares.setdefault(namespace, asyncio.Semaphore(CONNECTIONS_OF_NAMESPACE))
        async with share, self._all:
            return await fetch_report(address, port)


async def fetch_report(address: str, port: int) -> bytes | None:
    """Return the report at ``/report``, empty from a server that has none; None: it is not complete in time and size.

    A launcher of an older release, or another program on this port, has no report. A server error, such as an
    overload, is no response.
    """
    try:
        async with asyncio.timeout(TIMEOUT):
            response = await _request(address, port)
    except (TimeoutError, OSError, ValueError):
        return None
    head, _, body = response.partition(b"\r\n\r\n")
    status = STATUS.match(head)
    length = _LENGTH.search(head)
    if status is None or len(body) > REPORT_LIMIT or (length is not None and int(length[1]) != len(body)):
        return None
    if status[1] != b"200":
        return b"" if status[1].startswith(b"4") else None
    return body


async def _request(address: str, port: int) -> bytes:
    """Return a response, as much of it as may be used. Raises: OSError, ValueError."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        send_request(writer, address, "/report")
        return await read_response(reader, _HEAD_LIMIT + REPORT_LIMIT)
    finally:
        writer.close()


def send_request(writer: asyncio.StreamWriter, address: str, target: str) -> None:
    """Request a page of a pod by its address. Raises: ValueError, if the address is no text of ASCII."""
    host = f"[{address}]" if ":" in address else address
    writer.write(f"GET {target} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode("ascii"))


async def read_response(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Return a response up to its end; of a longer one little more than ``limit`` bytes. Raises: OSError."""
    response = b""
    while len(response) <= limit:
        chunk = await reader.read(_CHUNK)
        if not chunk:
            break
        response += chunk
    return response
