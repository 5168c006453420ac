"""An operator's process in a simulation: all of its memory, so that a second process starts without any."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, Literal, Protocol

import kopf

from ddp_operator.api.cluster import Event, Key, Object
from ddp_operator.decide.job_events import report_changes
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.resync import Laggard, Resync
from ddp_operator.reconcile import Reconciler
from ddp_operator.reconcile.turns import Turns
from tests.support.builders import respond

from .server import Ask

LEASE = 15.0
"""Seconds after which a successor replaces a frozen operator."""

Fence = Literal["closed", "late", "open"]
"""The late writes of a deposed operator: none; only the call that had passed its fence when the operator was stopped;
or, as if there were no fence, all writes of its pass."""


class ProcessContext(Protocol):
    """The environment of a process."""

    def clock(self) -> datetime: ...

    def want(self, key: Key, seconds: float = 0.0, *, of: Process | None = None) -> None: ...

    async def answer(self, ask: Ask, process: Process) -> tuple[int, Any, float]: ...

    async def page_of(self, pod: Object, process: Process) -> str | None: ...

    async def post(self, resource: Object, event: Event, process: Process) -> None: ...


class Process:
    """One operator: its memory and its schedule. It starts without memory."""

    def __init__(self, simulation: ProcessContext) -> None:
        self.wanted: dict[Key, datetime] = {}
        self.seen: dict[str, int] = {}
        """The version up to which its watch of a kind has delivered the history."""
        self.store = ObjectCache()
        self.client = _Client(simulation, self)
        self.cluster = _Cluster(simulation, self)
        followers = (partial(report_changes, {}),)
        self.reconciler = Reconciler(self.cluster, turns=Turns(), clock=simulation.clock, followers=followers)
        self.sync = _Synchroniser(
            self.client, self.store, namespaces=(), interval=1e9, on_change=lambda key: simulation.want(key, of=self)
        )
        self.fence: Fence | None = None
        """None: it leads."""
        self.stands = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.work: asyncio.Task[Any] | None = None
        """Its pending call when it was stopped."""
        self.client.fence = lambda: 0.0 if self.fence in ("closed", "late") else LEASE


class _Client(ApiClient):
    """The operator's client, whose calls end in the stand-in."""

    def __init__(self, simulation: ProcessContext, process: Process) -> None:
        super().__init__(self._log_in, qps=1e9, burst=1_000_000_000)
        self._simulation = simulation
        self._process = process

    async def _log_in(self) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server="http://simulation")

    async def connect(self) -> kopf.ConnectionInfo:
        return await self._log_in()

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
        query = {name: value for name, value in (params or {}).items() if name != "fieldValidation"}
        content_type = headers.get("Content-Type", "")
        ask = Ask(method, path, query, data or b"", content_type, headers["Accept"])
        return await self._simulation.answer(ask, self._process)


class _Synchroniser(Resync):
    """Changes that the watches have not delivered by now are lost, because the clock does not advance."""

    async def _settle(self, lagging: list[Laggard]) -> list[Laggard]:
        return [(kind, meta) for kind, meta in lagging if not self.store.is_current(kind, meta)]


class _Cluster(KubeCluster):
    """The operator's cluster. Tests set the pods' pages; Events are posted first."""

    def __init__(self, simulation: ProcessContext, process: Process) -> None:
        super().__init__(process.client, process.store, on_change=lambda key: simulation.want(key, of=process))
        self._simulation = simulation
        self._process = process

    async def read_report(self, pod: Object, port: int) -> bytes | None:
        return respond(await self._simulation.page_of(pod, self._process))

    async def emit(self, resource: Object, event: Event) -> None:
        await self._simulation.post(resource, event, self._process)
