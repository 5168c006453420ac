"""The running operator: client, store, queue and reconcile wired together, apart from how events come in; its pages."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import kopf

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.status import Profile
from ddp_operator.cluster import Key
from ddp_operator.constants import KIND
from ddp_operator.health import HealthServer
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.children import key_of
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.credentials import login
from ddp_operator.kube.resync import CHILD_SELECTOR, Resync
from ddp_operator.kube.startup_checks import check_cluster, find_loss
from ddp_operator.kube.watch import watch
from ddp_operator.leader import FENCE_SHARE, Leader, new_identity
from ddp_operator.manifests.children import load_launcher
from ddp_operator.reconcile import Reconciler
from ddp_operator.reconcile.profiles import read_job_defaults
from ddp_operator.settings import PREFIX, Settings, SettingsError
from ddp_operator.telemetry import Metrics
from ddp_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "default"
"""The own namespace of an operator that runs outside a cluster, where its kubeconfig names none."""
PAUSE, LONGEST_PAUSE, PAUSE_EACH = 0.2, 1.0, 0.001
"""Seconds between two passes over one job; for each of its children, so that a pass over a thousand pods, which make
news all the time while they start, takes a small share of a core. The Job controller looks at a Job's pods once a
second."""


def end_at_once() -> None:
    """End the process without another call to anybody: not even those that a regular end makes."""
    logging.shutdown()
    os._exit(1)


class Operator:
    """Everything that lives as long as the process. Create, start and stop it inside one event loop.

    ``on_lost`` is called when another operator has taken over. Raises: SettingsError.
    """

    def __init__(self, settings: Settings, *, on_lost: Callable[[], None] = end_at_once) -> None:
        self.settings = settings
        self.store = ObjectCache()
        self.metrics = Metrics(lambda: float(len(self.queue)), lambda: self.store.bodies(KIND))
        self._watched = [(kind, where) for kind in ("Job", "Pod") for where in settings.namespaces or (None,)]
        self.client = ApiClient(
            self.login,
            qps=settings.qps,
            burst=settings.burst,
            timeout=settings.call_timeout,
            unheard=settings.lease_seconds * (1 - FENCE_SHARE),
            watches=len(self._watched),
            on_call=self.metrics.on_call,
        )
        self.cluster = KubeCluster(self.client, self.store, on_change=self._on_change)
        self.reconciler = Reconciler(
            self.cluster,
            progress_interval=settings.progress_interval,
            defaults=_read_defaults(settings),
            on_transition=self.metrics.on_transition,
        )
        self.queue: WorkQueue[Key] = WorkQueue(
            self.reconciler.reconcile, workers=settings.workers, pause=self._pause, on_result=self.metrics.on_reconcile
        )
        self.sync = Resync(
            self.client,
            self.store,
            namespaces=settings.namespaces,
            interval=settings.resync_interval,
            on_change=self._on_change,
        )
        self.health = HealthServer(self.metrics, port=settings.health_port, alive=self._alive, ready=self._ready)
        self.leader: Leader | None = None
        self.metrics.leads.set_function(lambda: float(self.leader is not None and self.leader.leads))
        self._on_lost = on_lost
        self._arrived: dict[Key, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def login(self) -> kopf.ConnectionInfo:
        """Read the credentials anew (for the own client and for Kopf's)."""
        return await login(self.settings.kubeconfig)

    async def start(self) -> None:
        """Check what must be there, wait until no other operator leads, then start to work. Raises: StartupError."""
        load_launcher()  # a tenth of a second that no job has to wait for
        await self.health.start()
        home = (await self.client.connect()).default_namespace or DEFAULT_NAMESPACE
        await check_cluster(self.client, self.settings.namespaces, home=home)
        self.leader = Leader(
            client=self.client,
            namespace=home,
            name=self.settings.lease_name,
            identity=self.settings.identity or new_identity(),
            duration=self.settings.lease_seconds,
            on_lost=self._on_lost,
        )
        self.client.fence = self.leader.remaining
        await self.leader.acquire()
        self._tasks = [
            asyncio.create_task(self.sync.run(), name="synchroniser"),
            asyncio.create_task(self._work(), name="start of the workers"),
        ]
        for kind, namespace in self._watched:
            watching = watch(self.client, kind, namespace, CHILD_SELECTOR, self.on_event)
            self._tasks.append(asyncio.create_task(watching, name=f"watch of {kind}s"))

    async def find_loss(self) -> str | None:
        """Return what has gone without which no operator can work; None before the start, or where all is there."""
        return None if self.leader is None or not self.leader.leads else await find_loss(self.client)

    async def stop(self) -> None:
        """End all own tasks and connections. Kopf waits five seconds for whatever is left behind here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.queue.stop()
        await self.cluster.close()
        if self.leader is not None:
            await self.leader.release()
        await self.client.close()
        await self.health.stop()

    def on_event(self, kind: str, event_type: str | None, obj: Any) -> None:
        """Take in one watch event; ``event_type`` is None for an object of a listing."""
        if event_type == "DELETED":
            key = self.store.remove(kind, obj)
        else:
            meta = obj["metadata"]
            if event_type is None and self.store.entry(kind, meta.get("namespace", ""), meta["name"]) is not None:
                self.sync.nudge()  # listed though known: a watch began anew, and may have missed deletions
            key = self.store.apply(kind, obj)
        self._time_start(kind, event_type, obj["metadata"])
        if key is not None:
            self._on_change(key)

    def _time_start(self, kind: str, event_type: str | None, meta: Any) -> None:
        """Measure from the news of a new resource to that of its first Job (no news for the store: we made it)."""
        now, key = asyncio.get_running_loop().time(), key_of(kind, meta)
        if key is None:
            return
        if kind == KIND and event_type == "ADDED":
            self._arrived[key] = now
        elif kind == KIND and event_type == "DELETED":
            self._arrived.pop(key, None)
        elif kind == "Job" and event_type == "ADDED" and key in self._arrived:
            self.metrics.create_to_job.observe(now - self._arrived.pop(key))

    def _on_change(self, key: Key) -> None:
        if key.name:  # what many share is looked at when one of them is
            self.queue.add(key)

    def _pause(self, key: Key) -> float:
        return max(PAUSE, min(LONGEST_PAUSE, PAUSE_EACH * self.store.count_children(key)))

    async def _work(self) -> None:
        await self.sync.synced.wait()
        logger.info("ready: serving %s", ", ".join(self.settings.namespaces) or "all namespaces")
        self.queue.start()

    def _alive(self) -> str | None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return f"{task.get_name()} ended: {task.exception()}"
        if self.sync.synced.is_set() and not self.queue.alive and self._tasks and self._tasks[1].done():
            return "a worker ended"
        return None

    def _ready(self) -> str | None:
        if self.leader is not None and self.leader.follows:
            return None  # it stands by, ready to take over
        return None if self.sync.synced.is_set() else "the caches are not filled yet"


def _read_defaults(settings: Settings) -> Profile | None:
    """Return what jobs have that do not set it. Raises: SettingsError."""
    try:
        return read_job_defaults(settings.job_defaults)
    except InvalidManifest as error:
        raise SettingsError(f"{PREFIX}JOB_DEFAULTS: {error}") from None
