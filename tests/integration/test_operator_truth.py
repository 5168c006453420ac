"""Real Kopf against the stand-in, and real pages of two pods: stalls, stragglers and goodput reach the status."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ddp_operator.features.stalls import stragglers
from ddp_operator.reconcile import reconciler
from tests.support.builders import job_manifest, page
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors

ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Pages:
    """The pages of the two pods; rank 1 needs three times as long for its own part of a step."""

    def __init__(self) -> None:
        self.looks = 0
        self.age = 0.0
        self.step = 0

    def text(self, rank: int) -> str:
        """Return a pod's page. Unless the pod hangs, every scrape finds it ten steps further."""
        self.looks += 1
        if self.age == 0:
            self.step = 10 * self.looks
        behind = self.step - rank if self.age else self.step
        numbers = {"step": behind, "steps": behind, "step_seconds": behind * 0.001, "data_seconds": 0}
        compute = behind * (0.003 if rank else 0.001)
        return page(phase="Running", rank=rank, heartbeat_age=self.age, compute_seconds=compute, **numbers)


@asynccontextmanager
async def serve(pages: Pages) -> AsyncIterator[int]:
    """Respond on one port of both pods' addresses."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=pages.text(ADDRESSES.index(str(request.url.host))))

    app = web.Application()
    app.router.add_get("/report", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, ADDRESSES[0], 0).start()
        port = int(runner.addresses[0][1])
        await web.TCPSite(runner, ADDRESSES[1], port).start()
        yield port
    finally:
        await runner.cleanup()


def progressing(resource: Any) -> tuple[str, str, str]:
    for item in resource.get("status", {}).get("conditions", ()):
        if item["type"] == "Progressing":
            return item["status"], item["reason"], item["message"]
    return "", "", ""


async def test_slow_rank_goodput_and_stall_are_in_status_and_on_operators_page(
    actors: ClusterActors, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stragglers, "WINDOW", 0.2)
    monkeypatch.setattr(stragglers, "FIRST_WINDOW", 0.2)
    monkeypatch.setattr(reconciler, "MINOR_INTERVAL", 0.1)
    running = start(progress_interval=0.1)
    pages = Pages()
    async with serve(pages) as port:
        await actors.create(job_manifest(metrics={"port": port}, watchdog={"stallSeconds": 300}))
        for index, address in enumerate(ADDRESSES):
            await actors.run_pod("digits-1", index, ip=address)
        report = await actors.resource(
            "digits", lambda resource: resource.get("status", {}).get("stragglers"), "a straggler"
        )
        (slow,) = report["status"]["stragglers"]
        assert (slow["rank"], slow["cause"]) == (1, "compute")
        assert 0 < float(report["status"]["goodput"]) <= 1
        assert progressing(report)[:2] == ("True", "Training")
        async with aiohttp.ClientSession() as session, session.get(f"{running.url}/metrics") as answer:
            text = await answer.text()
        assert 'ddp_operator_goodput_ratio{namespace="default",of="lowest"}' in text

        pages.age = 120.0
        # The first report may come from pages that were read before and after the change.
        words = f"ranks 1 are behind step {pages.step}"
        stalled = await actors.resource(
            "digits",
            lambda result: progressing(result)[1] == "Stalled" and progressing(result)[2].endswith(words),
            words,
        )
        assert stalled["status"]["phase"] == "Running"
        pages.age = 0.0
        await actors.resource("digits", lambda results: progressing(results)[1] == "Training", "training again")
    events = [event["reason"] for event in await actors.list("Event")]
    assert events.count("Stalled") == 1
