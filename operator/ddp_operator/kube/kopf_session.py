"""Kopf's connection to the API server: its responses are limited before Kopf decodes them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import kopf

from ddp_operator.kube.incoming import limit_response


def open_kopf_session(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """Return the session that Kopf would open with these credentials, but with limited responses."""
    return kopf.AiohttpSession(
        server=info.server,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=_LimitedResponse,
        ),
    )


class _LimitedResponse(aiohttp.ClientResponse):
    """A response whose body, and each line of which, is limited."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the headers."""
        await super().start(connection)
        self.content = _LimitedLines(self.content)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        """Return the decoded body."""
        return json.loads(limit_response(await self.read(), specs_as_text=True))


class _LimitedLines:
    """The stream of a response: ``iter_chunked`` yields whole lines."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield the lines of a watch. ``size``: the maximum bytes of a read."""
        rest = bytearray()
        async for chunk in self._stream.iter_chunked(size):
            rest += chunk
            if b"\n" not in chunk:
                continue
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                yield limit_response(line, specs_as_text=True) + b"\n"
        if rest:
            yield limit_response(bytes(rest), specs_as_text=True)
