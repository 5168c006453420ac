"""The operator's pages under many and slow connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from ddp_operator.manager import health
from ddp_operator.manager.health import HealthServer
from ddp_operator.manager.telemetry import OperatorMetrics


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HealthServer]:
    monkeypatch.setattr(health, "READY_SECONDS", 0.5)
    running = HealthServer(OperatorMetrics(lambda: 0.0), port=0, alive=lambda: None, ready=lambda: "not yet")
    await running.start()
    yield running
    await running.stop()


async def get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return int(text.split()[1]), text


async def test_health_pages_respond(server: HealthServer) -> None:
    assert (await get(server.port, "/healthz"))[0] == 200
    status, text = await get(server.port, "/readyz")
    assert (status, text.splitlines()[-1]) == (503, "not yet")
    assert "# TYPE ddp_operator" in (await get(server.port, "/metrics"))[1]


async def test_readiness_probe_waits_for_the_start(server: HealthServer) -> None:
    problems = iter(["not yet", "not yet", "not yet"])
    server._ready = lambda: next(problems, None)
    assert (await get(server.port, "/readyz"))[0] == 200


def is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed a connection on which it sent nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


async def test_more_silent_connections_than_allowed_close_oldest_and_probes_get_through(
    server: HealthServer,
) -> None:
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(health.MAX_CONNECTIONS + 8):
            connect = functools.partial(socket.create_connection, ("127.0.0.1", server.port), timeout=60)
            silent.append(stack.enter_context(await asyncio.to_thread(connect)))
        assert (await get(server.port, "/healthz"))[0] == 200
        assert [is_closed(connection) for connection in silent[:8]] == [True] * 8
        assert not is_closed(silent[-1])


async def test_connection_ends_after_its_lifetime_while_bytes_still_arrive(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CONNECTION_SECONDS", 0.3)

    def send_slowly() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
            for _ in range(1000):
                connection.sendall(b"x")
                time.sleep(0.01)

    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        await asyncio.to_thread(send_slowly)


async def test_metrics_page_is_generated_once_for_burst_of_requests(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PAGE_SECONDS", 600.0)
    generated: list[object] = []

    def generate(registry: object) -> bytes:
        generated.append(registry)
        return b"page\n"

    monkeypatch.setattr(health, "generate_latest", generate)
    for _ in range(5):
        assert (await get(server.port, "/metrics"))[1].endswith("page\n")
    assert len(generated) == 1


async def test_health_responds_during_metrics_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()
    release = threading.Event()
    loop = asyncio.get_running_loop()

    def count(registry: Any) -> bytes:
        loop.call_soon_threadsafe(began.set)
        assert release.wait(60)
        return b"counted"

    monkeypatch.setattr(health, "generate_latest", count)
    server = HealthServer(OperatorMetrics(lambda: 0.0), port=0, alive=lambda: None, ready=lambda: None)
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://localhost:{server.port}") as session:
            metrics = asyncio.create_task(session.get("/metrics"))
            await began.wait()
            async with session.get("/healthz") as answer:
                assert await answer.text() == "ok\n"
            assert not metrics.done()
            release.set()
            assert await (await metrics).text() == "counted"
    finally:
        release.set()
        await server.stop()
