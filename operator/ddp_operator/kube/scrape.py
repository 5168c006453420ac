"""Read the metrics page of a training pod within limits.

The pod runs code of users, so requests have no credentials or cookies, follow no redirects, and have bounded time and
size without decompression. Parsing all pages takes at most half of the event loop's time, in slices, so that the Lease
is renewed and ``/healthz`` answers for any content of the pages.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final
from weakref import WeakValueDictionary

import aiohttp

TIMEOUT: Final = 2.0
SIZE_LIMIT: Final = 1 << 20
CONNECTIONS: Final = 256
"""Pages that are read concurrently. Only aiohttp's buffer of each is in memory."""
CONNECTIONS_OF_NAMESPACE: Final = 16
"""Pages of one namespace that are read concurrently."""
SLICE: Final = 1 << 15
"""Bytes that are parsed before other tasks run, in at most a few milliseconds."""

Take = Callable[[bytes], None]


class ParsingTurns:
    """Schedules parsing: one slice at a time, in order, and then a pause of the same duration for other tasks."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._free_at = 0.0

    async def feed(self, take: Take, piece: bytes) -> None:
        """Pass a piece of a page to its parser in this caller's turn."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            await asyncio.sleep(max(0.0, self._free_at - loop.time()))
            started = loop.time()
            take(piece)
            ended = loop.time()
            self._free_at = ended + (ended - started)


class Scraper:
    """Reads metrics pages, with a session separate from the API server's."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._turns = ParsingTurns()
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, address: str, port: int, take: Take, namespace: str = "") -> bool:
        """Pass the page at ``/metrics`` to ``take`` in pieces. Returns whether it is complete, in time and size.

        ``namespace``: that of the pod. Each has a share of the connections.

        A server that refuses the request has an empty page. A server error, such as an overload, is no page.
        """
        host = f"[{address}]" if ":" in address else address
        size = 0
        share = self._shares.setdefault(namespace, asyncio.Semaphore(CONNECTIONS_OF_NAMESPACE))
        try:
            async with (
                share,
                asyncio.timeout(TIMEOUT),
                self._open().get(f"http://{host}:{port}/metrics", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return 400 <= response.status < 500  # another program serves this port
                async for chunk in response.content.iter_any():
                    size += len(chunk)
                    if size > SIZE_LIMIT:
                        return False
                    for piece in _slices(chunk):
                        await self._turns.feed(take, piece)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Each pod is read every ten seconds: keeping its connection open costs more than opening one.
                connector=aiohttp.TCPConnector(force_close=True, limit=CONNECTIONS),
                headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=SLICE,
            )
        return self._session


def _slices(chunk: bytes) -> Iterator[bytes]:
    for start in range(0, len(chunk), SLICE):
        yield chunk[start : start + SLICE]
