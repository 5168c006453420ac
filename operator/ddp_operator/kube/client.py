"""A small HTTP client for the Kubernetes API: one session, JSON bodies, a rate limit, and typed errors.

The official clients need 20 to 50 MB and a second of start-up time. The session uses Kopf's ``ConnectionInfo``, so the
operator and Kopf connect to the same server as the same user.
"""

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar

import aiohttp
import kopf
import msgspec

from ddp_operator._version import __version__
from ddp_operator.api.cluster_errors import ClusterError, Refused, VersionConflict
from ddp_operator.api.constants import GROUP
from ddp_operator.api.nesting import limit_nesting
from ddp_operator.kube.incoming import limit_response
from ddp_operator.kube.resources import path, plural

# asyncio fills a buffer of 256 KiB for each connection with TLS, of which one call reads 16 KiB at a time.
sslproto.SSLProtocol.max_size = 32 << 10

T = TypeVar("T")
Login = Callable[[], Awaitable[kopf.ConnectionInfo]]
OnCall = Callable[[str, str, str], None]
"""Called after every call with its verb, the resource's plural name and the HTTP status (or ``error``)."""

CONNECTIONS = 24
"""Connections for calls: enough for the usual number of workers."""
CONNECT_TIMEOUT = 10.0
SEND_BUFFER = 208 * 1024
"""Bytes; Linux doubles them, and allows no more by default.

The kernel must buffer a whole body: a frozen process would send the rest after it resumes, when another operator may
lead. Only the launcher's ConfigMap may be larger. Its name is the hash of its content, so a late write is harmless.
"""
LONGEST_PAUSE = 30.0
"""Upper bound in seconds for a Retry-After header."""
GATHER = 0.05
"""Seconds between two reads of a watch, so that the events of a burst are read together."""
RENEW_BEFORE = timedelta(seconds=30)

MAX_ANSWER = 32 << 20
"""Default limit of a response body in bytes."""

CHUNK: Final = 250
"""Objects in one page of a list."""
PAGE_BYTES: Final = 4 << 20
"""Maximum bytes of one page. A parsed page takes a multiple of its bytes in memory."""
OBJECT_BYTES: Final = 32 << 20
"""Maximum bytes of a page with a single object, more than an API server stores."""

INVALID = frozenset({400, 413, 422})
"""HTTP statuses for a body that the API server will never accept."""

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_METADATA: Final = "as=PartialObjectMetadata"
MESSAGE_LIMIT = 2000
"""Maximum characters of an API server's message: about a dozen field errors, and short enough for a status."""


class StartupError(Exception):
    """The operator cannot start. The message has one line with the problem and the remedy."""


class ObjectNotFound(ClusterError):
    """The object, namespace or kind does not exist (404)."""


class AnswerTooLarge(ClusterError):
    """A response body exceeds its limit."""


class ResponseError(Exception):
    """An HTTP status of 400 or more, with reason and message of the body (a ``Status`` object)."""

    def __init__(self, status: int, body: Mapping[str, Any] | None = None, *, what: str = "") -> None:
        body = body or {}
        self.status = status
        self.reason = str(body.get("reason") or "")
        self.message = trim(str(body.get("message") or f"HTTP {status}"))
        super().__init__(f"{what}: {self.message}" if what else self.message)


def trim(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Return the text, cut to ``limit`` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class RateLimiter:
    """A token bucket: ``burst`` calls at once, then ``qps`` per second."""

    def __init__(self, qps: float, burst: int) -> None:
        self._step = 1.0 / qps
        self._tolerance = (burst - 1) * self._step
        self._due = float("-inf")  # when the next call is due at an even rate

    async def acquire(self) -> None:
        """Wait until the next call may start. Calls start in the order of their requests."""
        now = asyncio.get_running_loop().time()
        due = max(self._due, now)
        self._due = due + self._step
        delay = due - self._tolerance - now
        if delay > 0:
            await asyncio.sleep(delay)

    def pause(self, seconds: float) -> None:
        """Start no call for some seconds, as the server requested."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now + min(seconds, LONGEST_PAUSE) + self._tolerance)


class ApiClient:
    """Makes calls to one API server. Use and close it in one event loop."""

    def __init__(
        self,
        login: Login,
        *,
        qps: float = 500.0,
        burst: int = 1000,
        timeout: float = 30.0,
        unheard: float | None = None,
        watches: int = 0,
        on_call: OnCall | None = None,
    ) -> None:
        """Create an unconnected client.

        ``watches``: the number of watches, each of which occupies a connection.
        ``unheard``: maximum seconds for which the kernel retransmits data that the API server does not acknowledge,
        also after the call has failed; None: the kernel's default, which is minutes.
        """
        self._login = login
        self._limiter = RateLimiter(qps, burst)
        self._timeout = timeout
        self._unheard = unheard
        self._connections = CONNECTIONS + watches
        self._on_call = on_call
        self.fence: Callable[[], float] | None = None
        """Returns the maximum seconds for a write that starts now, 0 if it must not be sent. None: no limit."""
        self._info: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self._server_time = ""
        self._lock = asyncio.Lock()

    @property
    def server_time(self) -> datetime | None:
        """The time of the API server at its last response; None: it has sent none."""
        try:
            return parsedate_to_datetime(self._server_time)
        except ValueError:
            return None

    async def connect(self) -> kopf.ConnectionInfo:
        """Log in if there are no credentials, or if they expire soon. Raises: StartupError."""
        info = self._info
        if info is not None and not _expires(info):
            return info
        async with self._lock:
            if self._info is info:  # otherwise another task has logged in
                self._use(await self._login())
        assert self._info is not None
        return self._info

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        kind: str = "",
        urgent: bool = False,
        max_bytes: int = MAX_ANSWER,
        is_text: bool = False,
    ) -> Any:
        """Make one call and return the parsed JSON; with ``is_text`` the bytes of the body.

        ``urgent`` bypasses the rate limit and the fence: for calls about the Lease, on which the fence depends.

        Raises: ResponseError for a status of 4xx that a retry would not change; ClusterError for errors that a
        retry may not have: no connection, a timeout, 429 and 5xx.
        """
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": accept}
        if data is not None:
            headers["Content-Type"] = content_type
        what = f"{method} {path}"
        for attempt in (1, 2):
            if not urgent:
                await self._limiter.acquire()
            info = await self._credentials(what)
            seconds = self._timeout
            if method != "GET" and not urgent and self.fence is not None:
                seconds = min(seconds, self.fence())
                if seconds <= 0:
                    raise ClusterError(f"{what}: not sent, because this operator is not the leader")
            status, answer, retry_after = await self._send(
                info, method, path, params, data, headers, kind, seconds, max_bytes, is_text=is_text
            )
            if status == 401 and attempt == 1:
                # Kubernetes renews the token file while the process runs: read it again and retry once.
                await self._renew(info)
                continue
            break
        if status < 400:
            return answer
        raise self._error(what, status, answer, retry_after)

    async def watch(
        self, path: str, params: Mapping[str, str], *, kind: str, silence: float, accept: str = "application/json"
    ) -> AsyncGenerator[bytes]:
        """Yield the lines of a watch until the API server ends it, or sends nothing for ``silence`` seconds.

        Raises: ResponseError, ClusterError, as ``request``.
        """
        what = f"watch {path}"
        await self._limiter.acquire()
        info = await self._credentials(what)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=silence)
        params = {"watch": "true", "allowWatchBookmarks": "true", **params}
        headers = {"Accept": accept}
        rest = b""
        with self._count_call(what, "watch", kind, silence) as statuses:
            async with self._open_call(info, "GET", path, headers=headers, params=params, timeout=timeout) as response:
                statuses.append(str(response.status))
                if response.status >= 400:
                    answer = _decode(await response.read(), response.status)
                    if response.status == 401:
                        await self._renew(info)
                    raise self._error(what, response.status, answer, _seconds(response.headers.get("Retry-After")))
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line  # one event
                    await asyncio.sleep(GATHER)

    async def close(self) -> None:
        """Close the connections. Running calls fail with ClusterError."""
        session = self._session
        self._session = None
        self._info = None
        if session is not None:
            await session.close()

    async def _send(
        self,
        info: kopf.ConnectionInfo,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | None,
        headers: dict[str, str],
        kind: str,
        seconds: float,
        max_bytes: int,
        *,
        is_text: bool,
    ) -> tuple[int, Any, float]:
        """Return status, parsed body (None when it is not JSON) and the seconds of Retry-After."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT)
        with self._count_call(f"{method} {path}", VERBS.get(method, method), kind, seconds) as statuses:
            async with self._open_call(
                info, method, path, params=params, data=data, headers=headers, timeout=timeout
            ) as response:
                raw = await _read(response, max_bytes, f"{method} {path}")
                statuses.append(str(response.status))
                self._server_time = response.headers.get("Date", "")
                if is_text and response.status < 400:
                    return response.status, raw, 0.0
                # Only our custom resources have fields without a schema, and metadata have managedFields.
                is_large = GROUP in path or _METADATA in headers["Accept"]
                answer = _decode(await limit_response(raw) if is_large else raw, response.status)
                return response.status, answer, _seconds(response.headers.get("Retry-After"))

    def _open_call(
        self, info: kopf.ConnectionInfo, method: str, path: str, *, headers: Mapping[str, str] = {}, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise ClusterError(f"{method} {path}: the client is closed")
        url = info.server.rstrip("/") + path
        headers = {**headers, **info.as_http_headers()}
        return self._session.request(method, url, headers=headers, allow_redirects=False, **options)

    @contextmanager
    def _count_call(self, what: str, verb: str, kind: str, seconds: float) -> Iterator[list[str]]:
        """Count a call, and raise ClusterError if it fails. The block appends the HTTP status to the list."""
        statuses = ["error"]
        try:
            yield statuses
        except TimeoutError:
            raise ClusterError(f"{what}: no response within {seconds:.3g} s") from None
        except aiohttp.ClientConnectorError as exc:
            reason = exc.os_error.strerror or exc.os_error
            raise ClusterError(f"{what}: cannot connect to {exc.host}:{exc.port}: {reason}") from exc
        except aiohttp.ClientError as exc:
            raise ClusterError(f"{what}: {str(exc) or type(exc).__name__}") from exc
        except RuntimeError as exc:  # aiohttp raises it if the session was closed meanwhile
            raise ClusterError(f"{what}: {exc}") from exc
        finally:
            if self._on_call is not None:
                self._on_call(verb, kind, statuses[-1])

    def _error(self, what: str, status: int, answer: Any, retry_after: float) -> Exception:
        """Return the exception for a status of 400 or more. Pause all calls if the server requests it."""
        error = ResponseError(status, answer if isinstance(answer, dict) else None, what=what)
        if status == 429 and retry_after:
            self._limiter.pause(retry_after)
        if status in (401, 408, 429) or status >= 500:
            later = ClusterError(f"{error} (HTTP {status})")
            later.__cause__ = error
            return later
        return error

    async def _credentials(self, what: str) -> kopf.ConnectionInfo:
        try:
            return await self.connect()
        except StartupError as exc:
            raise ClusterError(f"{what}: {exc}") from exc

    async def _renew(self, info: kopf.ConnectionInfo) -> None:
        async with self._lock:
            if self._info is info:
                try:
                    self._use(await self._login())
                except StartupError as exc:
                    raise ClusterError(str(exc)) from exc

    def _use(self, info: kopf.ConnectionInfo) -> None:
        """Use new credentials. Requests carry the token; another server or TLS configuration needs a new session."""
        if self._session is None or self._info is None or _transport(self._info) != _transport(info):
            old = self._session
            self._session = self._open(info)
            if old is not None:
                # Running calls of the old session may finish: their timeout bounds them.
                asyncio.get_running_loop().call_later(self._timeout, lambda: asyncio.ensure_future(old.close()))
        self._info = info

    def _open(self, info: kopf.ConnectionInfo) -> aiohttp.ClientSession:
        secure: ssl.SSLContext | bool = True
        if info.server.startswith("https:"):
            try:
                secure = info.as_ssl_context()
            except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
                raise StartupError(f"the certificates for {info.server} are invalid: {exc}") from None
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, ssl=secure, socket_factory=self._make_socket),
            headers={"User-Agent": f"ddp-operator/{__version__}"},
            proxy=info.proxy_url,
            # Do not send a cookie of one response with later calls.
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        connection = socket.socket(family, kind, protocol)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
        if self._unheard is not None and option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, int(self._unheard * 1000))
        return connection


async def call(
    client: ApiClient,
    method: str,
    kind: str,
    namespace: str | None,
    name: str | None = None,
    subresource: str | None = None,
    *,
    refusable: bool = False,
    **options: Any,
) -> Any:
    """Make a call about one object, or about a list of them, and return the parsed JSON.

    Raises: ObjectNotFound, VersionConflict, ClusterError; with ``refusable`` also Refused, if a retry cannot help.
    """
    try:
        return await client.request(method, path(kind, namespace, name, subresource), kind=plural(kind), **options)
    except ResponseError as error:
        if refusable and error.status == 403:
            raise Refused(error.message, reason="Forbidden") from error
        if refusable and error.status in INVALID:
            raise Refused(error.message, reason="Invalid") from error
        exceptions = {404: ObjectNotFound, 409: VersionConflict}
        raise exceptions.get(error.status, ClusterError)(str(error)) from error


async def pages(
    client: ApiClient, kind: str, namespace: str | None, params: Mapping[str, str], **options: Any
) -> AsyncIterator[Any]:
    """Yield a list page by page; ``params`` limit the objects in each, PAGE_BYTES their size.

    A page that is too large is read again with half the objects. Options and exceptions are those of ``call``.
    """
    max_limit = int(params["limit"])
    limit = max_limit
    token = ""
    while True:
        page_params = {**params, "limit": str(limit)}
        if token:
            page_params["continue"] = token
        max_bytes = PAGE_BYTES if limit > 1 else OBJECT_BYTES
        try:
            page = await call(client, "GET", kind, namespace, params=page_params, max_bytes=max_bytes, **options)
        except AnswerTooLarge:
            if limit == 1:
                raise
            limit = max(1, limit // 2)
            continue
        yield page
        token = str((page.get("metadata") or {}).get("continue") or "")
        if not token:
            return
        limit = min(max_limit, limit * 2)


async def _read(response: aiohttp.ClientResponse, max_bytes: int, what: str) -> bytes:
    """Return the body. Raises: AnswerTooLarge."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise AnswerTooLarge(f"{what}: the response exceeds {max_bytes >> 20} MiB")
    return bytes(body)


def _expires(info: kopf.ConnectionInfo) -> bool:
    if info.expiration is None:
        return False
    expiration = info.expiration if info.expiration.tzinfo else info.expiration.replace(tzinfo=UTC)
    return datetime.now(UTC) >= expiration - RENEW_BEFORE


def _transport(info: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """Return the part of the credentials that concerns the connection, not a request."""
    return replace(info, scheme=None, username=None, password=None, token=None, default_namespace=None, expiration=None)


def decode_json(raw: bytes, type: type[T]) -> T:
    """Return decoded JSON, with null for what is nested too deep. Raises: msgspec.DecodeError, UnicodeDecodeError."""
    try:
        return msgspec.json.decode(raw, type=type)
    except RecursionError:
        return msgspec.json.decode(limit_nesting(raw), type=type)


def _decode(raw: bytes, status: int) -> Any:
    try:
        return decode_json(raw, object)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if status < 400:
            raise ClusterError("the API server's response is not JSON") from None
        return None  # the error page of a proxy; the HTTP status is sufficient


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:  # a date, which no Kubernetes component sends
        return 1.0
