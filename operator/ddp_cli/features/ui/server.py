"""The server of `ddp ui`: pages of this machine for the browser of the user who started it, and nobody else.

Other programs and web sites reach the port too. The secret in the address becomes a cookie that no other site's request
carries; the names of the host are checked against DNS rebinding; and nothing here changes a job.
"""

import asyncio
import hmac
import json
import operator
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from ddp_cli.client.errors import ClientError, NotFound
from ddp_cli.features.ui.compare import render_comparison
from ddp_cli.features.ui.logs import LogQuery
from ddp_cli.features.ui.render import SCRIPTS, STATIC, STYLES, render, render_parts, to_json
from ddp_cli.features.ui.rows import Attention, Row, sort_rows
from ddp_cli.features.ui.sources import Source
from ddp_cli.view.terminal import make_printable

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
_TYPES: Final = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_TICK_SECONDS: Final = 0.7
_PING_SECONDS: Final = 10.0
_CURVES_SECONDS: Final = 1.0
_FOLLOW_SECONDS: Final = 0.3
_MOST_STREAMS: Final = 32
_FIRST_ROWS: Final = 24
"""Rows of the page itself, so that it is painted soon; the stream sends the others."""
MOST_COMPARED: Final = 8
_COOKIE: Final = "ddp-ui"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The pages of some places. ``token``: the secret in the address."""

    def __init__(self, sources: Sequence[Source], places: str) -> None:
        self.token = secrets.token_urlsafe(32)
        self._sources = sources
        self._places = places
        self._rows: dict[str, Row] = {}
        self._parts: list[Mapping[str, Row]] = []
        self._html: dict[str, tuple[Row, str]] = {}
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
                web.get("/static/{name}", self._send_static),
            ]
        )
        for path in ("/{kind:run}/{name}", "/{kind:job|record}/{namespace}/{name}"):
            app.add_routes(
                [
                    web.get(path, self._show_job),
                    web.get(f"{path}/events", self._stream_job),
                    web.get(f"{path}/log", self._send_log),
                    web.get(f"{path}/follow", self._stream_log),
                    web.get(f"{path}/renew", self._renew),
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
        if not hmac.compare_digest(request.query["token"].encode(), self.token.encode()):
            return self._refuse(403, "This secret is that of another session; start `ddp ui` again.")
        response = web.Response(text=render("enter"), content_type="text/html")
        response.set_cookie(self._cookie(request), self.token, httponly=True, samesite="Strict", path="/")
        return response

    @staticmethod
    def _cookie(request: web.Request) -> str:
        """Return the name of the cookie: cookies do not know ports, so each has its own."""
        return f"{_COOKIE}-{request.url.port}"

    def _is_known(self, request: web.Request) -> bool:
        return hmac.compare_digest(request.cookies.get(self._cookie(request), "").encode(), self.token.encode())

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

    def _read_rows(self) -> dict[str, Row]:
        parts = [source.refresh() for source in self._sources]
        if len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts)):
            return self._rows
        self._parts = parts
        listed = [row for part in parts for row in part.values()]
        present = {row.uid for row in listed if row.attention is not Attention.DELETED}
        # A record is stored before its job is deleted.
        rows = {row.key: row for row in listed if row.attention is not Attention.DELETED or row.uid not in present}
        html = {}
        for key, row in rows.items():
            before = self._html.get(key)
            html[key] = before if before is not None and before[0] == row else (row, render("row", row=row))
        self._html = html
        return rows

    def _find_source(self, key: str) -> Source:
        for source in self._sources:
            if key.startswith(f"{source.kind}/"):
                return source
        raise NotFound(f"{key[:80]}: this page shows no such jobs; `ddp ui --help` has the options")

    @property
    def _problems(self) -> list[str]:
        return [source.problem for source in self._sources if source.problem]

    async def _show_list(self, request: web.Request) -> web.Response:
        first = sort_rows(self._rows.values())[:_FIRST_ROWS]
        rows = [self._html[row.key][1] for row in first]
        text = render("list", rows=rows, places=self._places, problems=self._problems, most=MOST_COMPARED)
        return web.Response(text=text, content_type="text/html")

    async def _stream_list(self, request: web.Request) -> web.StreamResponse:
        """Send the rows that are new or have changed, and the keys of those that were deleted."""
        async with _Stream(self, request) as stream:
            sent: dict[str, str] = {}
            seen: object = None
            while True:
                await self.refresh()
                state = self._rows, self._problems
                if state != seen:
                    seen = state
                    html = {key: self._html[key][1] for key in self._rows}
                    changed = {key: text for key, text in html.items() if sent.get(key) != text}
                    gone = [key for key in sent if key not in html]
                    order = [row.key for row in sort_rows(self._rows.values())]
                    problems = list(map(make_printable, self._problems))
                    await stream.send("rows", {"rows": changed, "gone": gone, "order": order, "problems": problems})
                    sent = html
                await stream.rest()
                await self._wait()
        return stream.response

    @staticmethod
    def _key(request: web.Request) -> str:
        return "/".join(request.match_info.values())

    async def _show_job(self, request: web.Request) -> web.Response:
        key = self._key(request)
        page = await asyncio.to_thread(self._find_source(key).read_page, key)
        text = render("job", page=page, parts=render_parts(page), curves=to_json(page.curves))
        return web.Response(text=text, content_type="text/html")

    async def _stream_job(self, request: web.Request) -> web.StreamResponse:
        """Send the parts of a job's page that have changed."""
        key = self._key(request)
        source = self._find_source(key)
        async with _Stream(self, request) as stream:
            sent: dict[str, str] = {}
            drawn = ""
            due = 0.0
            seen: object = self
            clock = asyncio.get_running_loop().time
            while True:
                signature = await asyncio.to_thread(source.sign, key)
                if signature != seen:
                    page = await asyncio.to_thread(source.read_page, key)
                    parts = await asyncio.to_thread(render_parts, page)
                    changed = {name: text for name, text in parts.items() if sent.get(name) != text}
                    if changed:
                        await stream.send("parts", changed)
                    sent = parts
                    curves = to_json(page.curves)
                    is_due = clock() >= due
                    seen = signature if is_due or curves == drawn else self  # otherwise at a later look
                    if is_due and curves != drawn:
                        drawn = curves
                        due = clock() + _CURVES_SECONDS * (1 + len(curves) // 100_000)
                        await stream.write("curves", curves)
                await stream.rest()
                await self._wait()
        return stream.response

    async def _send_log(self, request: web.Request) -> web.Response:
        key = self._key(request)
        query = read_query(request)
        cursor = request.query.get("before", "")
        piece = await asyncio.to_thread(self._find_source(key).read_log, key, query, cursor)
        html = render("lines", lines=piece.lines)
        return web.json_response({"html": html, "before": piece.before, "note": piece.note})

    async def _stream_log(self, request: web.Request) -> web.StreamResponse:
        """Send the new lines of a log."""
        key = self._key(request)
        query = read_query(request)
        follower = await asyncio.to_thread(self._find_source(key).follow_log, key)
        try:
            async with _Stream(self, request) as stream:
                while True:
                    lines = await asyncio.to_thread(follower.read, query)
                    if lines:
                        await stream.send("lines", {"html": render("lines", lines=lines)})
                    await stream.rest()
                    await asyncio.sleep(_FOLLOW_SECONDS)
            return stream.response
        finally:
            follower.close()

    async def _renew(self, request: web.Request) -> web.Response:
        key = self._key(request)
        await asyncio.to_thread(self._find_source(key).renew, key)
        return web.json_response({})

    async def _show_comparison(self, request: web.Request) -> web.Response:
        keys = request.query.getall("job", [])
        if not 2 <= len(keys) <= MOST_COMPARED:
            raise ClientError(f"choose two to {MOST_COMPARED} jobs in the list to compare them")
        runs = [await asyncio.to_thread(self._find_source(key).read_run, key) for key in keys]
        text = await asyncio.to_thread(render_comparison, runs, keys)
        return web.Response(text=text, content_type="text/html")

    async def _send_static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in (*SCRIPTS, *STYLES, "icon.svg"):
            raise web.HTTPNotFound
        text = (STATIC / name).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=_TYPES[name.rpartition(".")[2]])


def check_request(request: web.Request) -> str:
    """Return why a request may not be answered; empty: it may."""
    host = re.sub(r":\d{1,5}$", "", request.headers.get("Host", ""))
    if host not in _HOSTS:
        return "This server answers on 127.0.0.1 and localhost only."
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.headers['Host']}":
        return "This server does not answer other web sites."
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not _is_navigation(request):
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


class _Stream:
    """A response of server-sent events. Their number is limited."""

    def __init__(self, server: Server, request: web.Request) -> None:
        self._server = server
        self._request = request
        self.response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        self._sent_at = 0.0

    async def __aenter__(self) -> "_Stream":
        if self._server._streams >= _MOST_STREAMS:
            raise ClientError(f"{_MOST_STREAMS} pages are open already; close some")
        await self.response.prepare(self._request)
        self._server._streams += 1
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """End the stream. What cannot be read is sent as a problem; the browser connects again."""
        self._server._streams -= 1
        if isinstance(error, ClientError):
            with suppress(ConnectionError):
                await self.send("problem", make_printable(str(error)))
        return isinstance(error, ClientError | ConnectionError)

    async def send(self, event: str, data: Any) -> None:
        """Send one event. Raises: ConnectionError, if the page was closed."""
        await self.write(event, json.dumps(data))

    async def write(self, event: str, text: str) -> None:
        """Send one event whose data are JSON already. Raises: ConnectionError, if the page was closed."""
        self._sent_at = asyncio.get_running_loop().time()
        await self.response.write(f"event: {event}\ndata: {text}\n\n".encode())

    async def rest(self) -> None:
        """Send a comment from time to time, by which a closed page is noticed."""
        if asyncio.get_running_loop().time() - self._sent_at > _PING_SECONDS:
            self._sent_at = asyncio.get_running_loop().time()
            await self.response.write(b": \n\n")
