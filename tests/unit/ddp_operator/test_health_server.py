"""The operator's pages: health answers whatever the metrics take."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp
import pytest

from ddp_operator import runtime
from ddp_operator.runtime import HealthServer
from ddp_operator.telemetry import Metrics


async def test_health_answers_while_metrics_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()
    release = threading.Event()
    loop = asyncio.get_running_loop()

    def count(registry: Any) -> bytes:
        loop.call_soon_threadsafe(began.set)
        assert release.wait(60)
        return b"counted"

    monkeypatch.setattr(runtime, "generate_latest", count)
    server = HealthServer(Metrics(lambda: 0.0), port=0, alive=lambda: None, ready=lambda: None)
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
