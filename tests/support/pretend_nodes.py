"""A scheduler and kubelets for thousands of pods without processes: bound, ready, scraped, and gone when deleted.

In the caller's event loop, with a few connections: the load on the API server is as with real nodes, that on this
machine is not.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from aiohttp import web

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.resync import CHILD_SELECTOR
from ddp_operator.kube.watch import watch
from tests.support.standin import ClusterActors
from tests.support.standin.actors import FINISHED, NODE, killed, running

PARALLEL = 16


class PretendNodes:
    """Runs every pod of one namespace from entering to leaving.

    ``page`` is each pod's report, on ``port`` of this machine; ``started`` counts pods by their Jobs.
    """

    def __init__(self, actors: ClusterActors, *, port: int, page: Callable[[], str]) -> None:
        self._actors = actors
        self._port = port
        self._page = page
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._address = own_address()
        self.started: Counter[str] = Counter()

    async def __aenter__(self) -> PretendNodes:
        app = web.Application()
        app.router.add_get("/report", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "0.0.0.0", self._port).start()
        client = self._actors.client
        namespace = self._actors.namespace
        self._tasks = [asyncio.create_task(self._work()) for _ in range(PARALLEL)]
        self._tasks.append(asyncio.create_task(watch(client, "Pod", namespace, CHILD_SELECTOR, self._on_event)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page(), content_type="application/json")

    def _on_event(self, kind: str, event: str | None, pod: Any) -> None:
        deleted = "deletionTimestamp" in pod["metadata"]
        if event != "DELETED" and (deleted or not pod["spec"].get("nodeName")):
            self._queue.put_nowait(pod)

    async def _work(self) -> None:
        while True:
            pod = await self._queue.get()
            with suppress(ResponseError):  # deleted meanwhile
                await (self._end if "deletionTimestamp" in pod["metadata"] else self._start)(pod)

    async def _start(self, pod: Any) -> None:
        name = pod["metadata"]["name"]
        await self._actors.bind(name, NODE)
        await self._actors.patch("Pod", name, {"status": running(pod, self._address)}, "status")
        self.started[pod["metadata"]["ownerReferences"][0]["name"]] += 1

    async def _end(self, pod: Any) -> None:
        meta = pod["metadata"]
        if pod["status"].get("phase") not in FINISHED:
            await self._actors.patch(
                "Pod", meta["name"], {"status": killed(pod, format_time(datetime.now(UTC)))}, "status"
            )
        await self._actors.delete("Pod", meta["name"], gracePeriodSeconds=0, preconditions={"uid": meta["uid"]})


def own_address() -> str:
    """Return an address of this machine that a Service may have as an endpoint, so not of the loopback.

    Raises: OSError if it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
