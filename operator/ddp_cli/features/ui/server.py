"""The server of `ddp ui`: pages of this machine for the browser of the user who started it, and nobody else.

Other programs and web sites reach the port too. The secret in the address becomes a cookie that no other site's request
carries; the names of the host are checked against DNS rebinding; and nothing here changes a job.
"""

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final

from aiohttp import web

from ddp_cli.client.errors import ClientError, NotFound
from ddp_cli.features.ui.compare import render_comparison
from ddp_cli.features.ui.logs import LogQuery
from ddp_cli.features.ui.render import (
    STATIC,
    render,
    render_curves,
    render_job,
    render_parts,
    render_rows,
)
from ddp_cli.features.ui.rows import Attention, Row
from ddp_cli.features.ui.sources import Source
from ddp_cli.view.terminal import make_printable

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
_TICK_SECONDS: Final = 0.7
_CURVES_SECONDS: Final = 1.0
_MOST_STREAMS: Final = 32
_FIRST_ROWS: Final = 24
"""Rows of the page itself, so that it is painted soon; the stream sends the others."""
MOST_COMPARED: Final = 8
_COOKIE: Final = "ddp-ui"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Events = AsyncGenerator[Sequence[tuple[str, str]]]
"""The events of each look, with their names and their data as JSON; none if nothing has changed."""


class Server:
    """The pages of some places. ``token``: the secret in the address."""

    def __init__(self, sources: Sequence[Source], places: str) -> None:
        self.token = secrets.token_urlsafe(32)
        self._sources = sources
        self._places = places
        self._rows: list[Row] = []
        self._changed = asyncio.Event()
        self._reading = asyncio.Lock()
        self._streams = 0

    def build(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 16)
        app.add_routes(
            [
                web.get("/", self._show_list),
                web.get("/events", self._stream_list),
                web.get("/compare", self._show_comparison),
                web.static("/static", STATIC),
            ]
        )
        for path in ("/{kind:run}/{name}", "/{kind:job|record}/{namespace}/{name}"):
            app.add_routes(
                [
                    web.get(path, self._show_job),
                    web.get(f"{path}/events", self._stream_job),
                    web.get(f"{path}/log", self._send_log),
                    web.get(f"{path}/follow", self._stream_log),
                ]
            )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests of other sites, other hosts and other users; add the headers."""
        problem = check_request(request)
        if problem:
            response: web.StreamResponse = self._refuse(403, problem)
        elif request.path == "/" and "token" in request.query:
            response = self._log_in(request)
        elif not self._is_known(request):
            response = self._refuse(403, "Open the address that `ddp ui` printed: it has the secret of this session.")
        else:
            response = await self._answer(request, handler)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self._refuse(error.status, f"{error.reason}: this page does not exist.")
        except NotFound as error:
            return self._refuse(404, str(error))
        except ClientError as error:
            return self._refuse(502, str(error))

    def _refuse(self, status: int, text: str) -> web.Response:
        return web.Response(text=render("problem", text=text, status=status), status=status, content_type="text/html")

    def _log_in(self, request: web.Request) -> web.Response:
        """Turn the secret of the address into a cookie.

        A page, and no redirect: after one, a browser that came from elsewhere would not send the cookie.
        """
        if not hmac.compare_digest(request.query["token"].encode(errors="surrogateescape"), self.token.encode()):
            return self._refuse(403, "This secret is that of another session; start `ddp ui` again.")
        response = web.Response(text=render("enter"), content_type="text/html")
        response.set_cookie(self._cookie(request), self.token, httponly=True, samesite="Strict", path="/")
        return response

    @staticmethod
    def _cookie(request: web.Request) -> str:
        """Return the name of the cookie: cookies do not know ports, so each has its own."""
        return f"{_COOKIE}-{request.url.port}"

    def _is_known(self, request: web.Request) -> bool:
        cookie = request.cookies.get(self._cookie(request), "").encode(errors="surrogateescape")
        return hmac.compare_digest(cookie, self.token.encode())

    def notify(self) -> None:
        """Wake the streams: a source has changed. Call it in the loop."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        """Wait for a change, or for the time of the next look at files."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _TICK_SECONDS)

    async def refresh(self) -> None:
        """Read the rows of all places."""
        async with self._reading:  # each open list asks for it, and sources are read by one thread at a time
            self._rows = await asyncio.to_thread(self._read_rows)

    def _read_rows(self) -> list[Row]:
        listed = [row for source in self._sources for row in source.refresh().values()]
        present = {row.uid for row in listed if row.attention is not Attention.DELETED}
        # A record is stored before its job is deleted.
        return [row for row in listed if row.attention is not Attention.DELETED or row.uid not in present]

    def _find(self, request: web.Request) -> tuple[Source, str]:
        """Return the place of the job that a request names, and its key. Raises: NotFound."""
        return self._find_source("/".join(request.rel_url.raw_parts[1 : 1 + len(request.match_info)]))

    def _find_source(self, key: str) -> tuple[Source, str]:
        for source in self._sources:
            if key.startswith(f"{source.kind}/") and key.count("/") >= (1 if source.kind == "run" else 2):
                return source, key
        raise NotFound(f"{key[:80]}: this page shows no such jobs; `ddp ui --help` has the options")

    @property
    def _problems(self) -> list[str]:
        return [make_printable(source.problem) for source in self._sources if source.problem]

    async def _show_list(self, request: web.Request) -> web.Response:
        if not self._rows:
            await self.refresh()  # a page that is opened at once may not state that there are no jobs
        rows = list(render_rows(self._rows).values())[:_FIRST_ROWS]
        text = render("list", rows=rows, places=self._places, problems=self._problems, most=MOST_COMPARED)
        return web.Response(text=text, content_type="text/html")

    async def _stream_list(self, request: web.Request) -> web.StreamResponse:
        return await self._send_events(request, self._follow_list())

    async def _follow_list(self) -> Events:
        """Yield the rows that are new or have changed, and the order of all."""
        sent: dict[str, str] = {}
        seen: object = None
        while True:
            await self.refresh()
            state = self._rows, self._problems
            if state == seen:
                yield ()
                continue
            seen = state
            html = await asyncio.to_thread(render_rows, self._rows)
            changed = {key: text for key, text in html.items() if sent.get(key) != text}
            sent = html
            yield [("rows", json.dumps({"rows": changed, "order": list(html), "problems": self._problems}))]

    async def _show_job(self, request: web.Request) -> web.Response:
        source, key = self._find(request)
        await asyncio.to_thread(source.renew, key)
        page = await asyncio.to_thread(source.read_page, key)
        return web.Response(text=render_job(page), content_type="text/html")

    async def _stream_job(self, request: web.Request) -> web.StreamResponse:
        return await self._send_events(request, self._follow_job(*self._find(request)))

    async def _follow_job(self, source: Source, key: str) -> Events:
        """Yield the parts of a job's page that have changed, and its curves, which are larger, less often."""
        sent: dict[str, str] = {}
        drawn = ""
        due = 0.0
        seen: object = self
        clock = asyncio.get_running_loop().time
        while True:
            signature = await asyncio.to_thread(source.sign, key)
            if signature == seen:
                yield ()
                continue
            page = await asyncio.to_thread(source.read_page, key)
            parts = await asyncio.to_thread(render_parts, page)
            changed = {name: text for name, text in parts.items() if sent.get(name) != text}
            sent = parts
            events = [("parts", json.dumps(changed))] if changed else []
            curves = await asyncio.to_thread(render_curves, page)
            is_late = curves != drawn and clock() < due
            seen = self if is_late else signature
            if curves != drawn and not is_late:
                drawn = curves
                due = clock() + _CURVES_SECONDS * (1 + len(curves) // 100_000)
                events.append(("curves", curves))
            yield events

    async def _send_log(self, request: web.Request) -> web.Response:
        source, key = self._find(request)
        piece = await asyncio.to_thread(source.read_log, key, read_query(request), request.query.get("before", ""))
        return web.json_response({**piece._asdict(), "lines": render("lines", lines=piece.lines)})

    async def _stream_log(self, request: web.Request) -> web.StreamResponse:
        source, key = self._find(request)
        follower = await asyncio.to_thread(source.follow_log, key)

        async def follow() -> Events:
            while True:
                lines = await asyncio.to_thread(follower.read, read_query(request))
                yield [("lines", json.dumps(render("lines", lines=lines)))] if lines else ()

        try:
            return await self._send_events(request, follow())
        finally:
            follower.close()

    async def _send_events(self, request: web.Request, looks: Events) -> web.StreamResponse:
        """Send server-sent events until the page is closed. What cannot be read is sent as a problem.

        The number of streams is limited. Raises: ClientError.
        """
        if self._streams >= _MOST_STREAMS:
            raise ClientError(f"{_MOST_STREAMS} pages are open already; close some")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._streams += 1
        try:
            async with aclosing(looks):
                async for events in looks:
                    for name, data in events:
                        await response.write(f"event: {name}\ndata: {data}\n\n".encode())
                    await self._wait()
                    if request.transport is None:
                        break  # the page was closed
        except ClientError as error:
            with suppress(ConnectionError):
                await response.write(f"event: problem\ndata: {json.dumps(make_printable(str(error)))}\n\n".encode())
        except ConnectionError:
            pass  # the page was closed meanwhile
        finally:
            self._streams -= 1
        return response

    async def _show_comparison(self, request: web.Request) -> web.Response:
        keys = request.query.getall("job", [])
        if not 2 <= len(keys) <= MOST_COMPARED:
            raise ClientError(f"choose two to {MOST_COMPARED} jobs in the list to compare them")
        pages = [await asyncio.to_thread(source.read_page, key) for source, key in map(self._find_source, keys)]
        text = await asyncio.to_thread(render_comparison, pages)
        return web.Response(text=text, content_type="text/html")


def check_request(request: web.Request) -> str:
    """Return why a request may not be answered; empty: it may."""
    header = request.headers.get("Host", "")
    host, _, port = header.rpartition(":")
    has_port = port.isascii() and port.isdecimal() and int(port[:6]) < 1 << 16
    if (host if has_port else header) not in _HOSTS:
        return "This server answers on 127.0.0.1 and localhost only."
    is_foreign = request.headers.get("Origin", f"http://{header}") != f"http://{header}"
    is_cross_site = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    if is_foreign or (is_cross_site and not _is_navigation(request)):
        return "This server does not answer other web sites."
    if request.method not in ("GET", "HEAD"):
        return "This server shows jobs and changes nothing."
    return ""


def _is_navigation(request: web.Request) -> bool:
    """Return whether a user follows a link; without the cookie, which other sites do not send, it shows no job."""
    return request.headers.get("Sec-Fetch-Mode") == "navigate" and request.headers.get("Sec-Fetch-Dest") == "document"


def read_query(request: web.Request) -> LogQuery:
    """Return which lines a request asks for."""
    rank = request.query.get("rank", "")
    return LogQuery(int(rank) if rank.isdecimal() and len(rank) < 8 else None, request.query.get("q", "")[:200])
