"""The HTTP client against a server with small faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta

import kopf
import pytest
import pytest_asyncio
from aiohttp import web

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.kube.client import LONGEST_PAUSE, ApiClient, RateLimiter, ResponseError, StartupError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Answer], Awaitable[str]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve every path by one function. Return the address."""
    runners: list[web.AppRunner] = []

    async def start(answer: Answer) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


class Logins:
    """A source of one token after another."""

    def __init__(self, server: str, *tokens: str, life: timedelta | None = None) -> None:
        self.server = server
        self.tokens = list(tokens)
        self.life = life
        self.count = 0

    async def __call__(self) -> kopf.ConnectionInfo:
        self.count += 1
        token = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        expiration = datetime.now(UTC) + self.life if self.life is not None else None
        return kopf.ConnectionInfo(server=self.server, token=token, expiration=expiration)


async def only_new(request: web.Request) -> web.Response:
    if request.headers["Authorization"] != "Bearer new":
        return web.json_response({"kind": "Status", "reason": "Unauthorized", "message": "Unauthorized"}, status=401)
    return web.json_response({"ok": True})


async def test_token_that_was_renewed_on_disk_is_read_again(serve: Serve) -> None:
    logins = Logins(await serve(only_new), "old", "new")
    client = ApiClient(logins)
    assert await client.request("GET", "/x") == {"ok": True}
    assert await client.request("GET", "/x") == {"ok": True}
    assert logins.count == 2
    await client.close()


async def test_token_is_reread_before_expiry(serve: Serve) -> None:
    logins = Logins(await serve(only_new), "new", life=timedelta(seconds=5))
    client = ApiClient(logins)
    for _ in range(3):
        await client.request("GET", "/x")
    assert logins.count == 3
    await client.close()


async def test_invalid_credentials_raise_without_loop(serve: Serve) -> None:
    logins = Logins(await serve(only_new), "old")
    client = ApiClient(logins)
    with pytest.raises(ClusterError, match="Unauthorized"):
        await client.request("GET", "/x")
    assert logins.count == 2
    await client.close()


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
async def test_permanent_error_has_server_message(serve: Serve, status: int) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": "Why", "message": "x" * 10_000}, status=status)

    client = ApiClient(Logins(await serve(refuse), "t"))
    with pytest.raises(ResponseError) as caught:
        await client.request("GET", "/x")
    assert (caught.value.status, caught.value.reason) == (status, "Why")
    assert len(caught.value.message) == 2000
    await client.close()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_transient_error_is_cluster_error(serve: Serve, status: int) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(text="<html>a proxy</html>", status=status)

    client = ApiClient(Logins(await serve(refuse), "t"))
    with pytest.raises(ClusterError, match=str(status)):
        await client.request("GET", "/x")
    await client.close()


async def test_response_without_json_is_cluster_error(serve: Serve) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>a captive portal</html>")

    client = ApiClient(Logins(await serve(page), "t"))
    with pytest.raises(ClusterError, match="not JSON"):
        await client.request("GET", "/x")
    await client.close()


async def test_token_is_not_sent_to_redirect_target(serve: Serve) -> None:
    reached: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.headers.get("Authorization", ""))
        return web.json_response({})

    target = await serve(elsewhere)

    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    client = ApiClient(Logins(await serve(redirect), "secret"))
    with pytest.raises(ClusterError):
        await client.request("GET", "/x")
    assert reached == []
    await client.close()


async def test_unreachable_server_is_named(serve: Serve) -> None:
    client = ApiClient(Logins("http://127.0.0.1:1", "t"))
    with pytest.raises(ClusterError, match=r"GET /x: cannot connect to 127\.0\.0\.1:1"):
        await client.request("GET", "/x")
    await client.close()


async def test_calls_are_counted_by_verb_resource_and_code(serve: Serve) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=201 if request.method == "POST" else 200)

    calls: list[tuple[str, str, str]] = []
    client = ApiClient(Logins(await serve(answer), "t"), on_call=lambda *call: calls.append(call))
    await client.request("POST", "/x", body={}, kind="jobs")
    await client.request("PUT", "/x", body={}, kind="jobs")
    assert calls == [("create", "jobs", "201"), ("update", "jobs", "200")]
    await client.close()


async def test_watch_lines_in_pieces_are_joined(serve: Serve) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        assert request.query == {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "7"}
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"one\ntw", b"o\n", b"th", b"ree\n" + b"x" * 300_000 + b"\n"):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    calls: list[tuple[str, str, str]] = []
    client = ApiClient(Logins(await serve(stream), "new"), on_call=lambda *call: calls.append(call))
    lines = [line async for line in client.watch("/pods", {"resourceVersion": "7"}, kind="pods", silence=60)]
    assert lines == [b"one", b"two", b"three", b"x" * 300_000]
    assert calls == [("watch", "pods", "200")]
    await client.close()


async def test_silent_watch_is_closed(serve: Serve) -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(3600)
        return response

    client = ApiClient(Logins(await serve(silent), "new"))
    with pytest.raises(ClusterError, match=r"watch /pods: no response within 0\.2 s"):
        async for _ in client.watch("/pods", {}, kind="pods", silence=0.2):
            pass
    await client.close()


async def test_watch_uses_renewed_token(serve: Serve) -> None:
    logins = Logins(await serve(only_new), "old", "new")
    client = ApiClient(logins)
    with pytest.raises(ClusterError, match="Unauthorized"):
        async for _ in client.watch("/pods", {}, kind="pods", silence=60):
            pass
    assert [line async for line in client.watch("/pods", {}, kind="pods", silence=60)] == []
    assert logins.count == 2
    await client.close()


async def test_closed_client_raises(serve: Serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    client = ApiClient(Logins(await serve(answer), "t"))
    await client.request("GET", "/x")
    await client.close()
    await client.close()


async def test_unusable_certificates_are_refused_in_one_line() -> None:
    async def login() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server="https://127.0.0.1:1", ca_data=b"-----BEGIN CERTIFICATE-----\nx\n")

    client = ApiClient(login)
    with pytest.raises(StartupError, match=r"certificates for https://127\.0\.0\.1:1 are invalid"):
        await client.connect()


class LoopClock:
    """A loop's time and sleep without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        clock = self

        class FakeLoop:
            def time(self) -> float:
                return clock.now

        async def sleep(seconds: float) -> None:
            clock.slept.append(round(seconds, 6))

        monkeypatch.setattr("ddp_operator.kube.client.asyncio.get_running_loop", FakeLoop)
        monkeypatch.setattr("ddp_operator.kube.client.asyncio.sleep", sleep)


@pytest.mark.parametrize(("burst", "expected"), [(1, [0.1, 0.2, 0.3]), (3, [0.1])])
async def test_rate_limit_allows_burst_and_spaces_further_calls(
    monkeypatch: pytest.MonkeyPatch, burst: int, expected: list[float]
) -> None:
    clock = LoopClock(monkeypatch)
    limiter = RateLimiter(qps=10, burst=burst)
    for _ in range(4):
        await limiter.acquire()
    assert clock.slept == expected
    clock.now += 60
    clock.slept.clear()
    await limiter.acquire()
    assert clock.slept == []


async def test_pause_delays_all_calls_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock(monkeypatch)
    limiter = RateLimiter(qps=10, burst=5)
    await limiter.acquire()
    limiter.pause(7)
    await limiter.acquire()
    assert clock.slept == [7.0]
    limiter.pause(1e9)
    await limiter.acquire()
    assert clock.slept[-1] <= LONGEST_PAUSE + 1


async def test_retry_after_delays_next_call(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr(RateLimiter, "pause", lambda self, seconds: paused.append(seconds))

    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"message": "slow down"}, status=429, headers={"Retry-After": "3"})

    client = ApiClient(Logins(await serve(busy), "t"))
    with pytest.raises(ClusterError, match="slow down"):
        await client.request("GET", "/x")
    assert paused == [3.0]
    await client.close()


async def test_closed_fence_stops_only_writes(serve: Serve) -> None:
    arrived: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        arrived.append(request.method)
        return web.json_response({})

    client = ApiClient(Logins(await serve(answer), "t"))
    client.fence = lambda: 0.0
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(ClusterError, match="not the leader"):
            await client.request(method, "/api/v1/pods")
    await client.request("GET", "/api/v1/pods")
    await client.request("PUT", "/leases", urgent=True)
    await client.close()
    assert arrived == ["GET", "PUT"]


async def test_write_timeout_is_bounded_by_fence(serve: Serve) -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    client = ApiClient(Logins(await serve(never), "t"), timeout=3600)
    client.fence = lambda: 0.05
    with pytest.raises(ClusterError, match=r"no response within 0\.05 s"):
        await client.request("POST", "/api/v1/pods")
    await client.close()
