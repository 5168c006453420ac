"""Reading a training pod's metrics page, whatever the pod does.

The pod runs foreign code, so it is given nothing (no credentials, no cookies, no redirects followed) and is trusted
with nothing: bounded time, bounded size, no decompression.
"""

import asyncio
from typing import Final

import aiohttp

TIMEOUT: Final = 2.0
SIZE_LIMIT: Final = 1 << 20


class Scraper:
    """A session apart from the API server's."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def read(self, address: str, port: int) -> str | None:
        """Return the page at ``/metrics``, or None where it does not come, is too long, or too slow."""
        host = f"[{address}]" if ":" in address else address
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                self._open().get(f"http://{host}:{port}/metrics", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return None
                page = bytearray()
                async for chunk in response.content.iter_any():
                    page += chunk
                    if len(page) > SIZE_LIMIT:
                        return None
                return page.decode("utf-8", errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Each pod is read every ten seconds: an open connection to each would cost more than opening one.
                connector=aiohttp.TCPConnector(force_close=True, limit=64),
                headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session
