"""The running operator: connects client, cache, queue, reconciler and health server. ``handlers`` delivers events."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import kopf

from ddp_operator.api.cluster import Key
from ddp_operator.api.constants import KIND
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.decide.hooks import Feature, Hooks, build_schema
from ddp_operator.decide.job_events import report_changes
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.children import CHILD_KINDS, key_of
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.credentials import login
from ddp_operator.kube.resync import CHILD_SELECTOR, Resync
from ddp_operator.kube.services import ServiceContext, close_services, prepare_services, run_service, start_services
from ddp_operator.kube.startup_checks import check_cluster, find_loss
from ddp_operator.kube.watch import watch
from ddp_operator.manager.health import HealthServer
from ddp_operator.manager.leader import FENCE_SHARE, Leader, new_identity
from ddp_operator.manager.reports import StatusReports
from ddp_operator.manager.settings import Settings, SettingsError
from ddp_operator.manager.telemetry import OperatorMetrics
from ddp_operator.manifests.children import load_launcher
from ddp_operator.reconcile.fair_turns import FairTurns
from ddp_operator.reconcile.lending import lend_worker
from ddp_operator.reconcile.placing import PlacingReconciler
from ddp_operator.reconcile.workqueue import WorkQueue

logger = logging.getLogger(__name__)

DEFAULT_NAMESPACE = "default"
"""The operator's own namespace if it runs outside a cluster and its kubeconfig has no namespace."""
SHORTEST_PAUSE = 0.2
"""Minimum seconds between two passes over one job."""
LONGEST_PAUSE = 1.0
MOST_ARRIVED = 5000
"""Maximum new resources without a Job whose time is known; refused and suspended ones may stay so for ever."""
PAUSE_PER_CHILD = 0.001
"""Additional seconds per child: starting pods cause events all the time, and each pass reads all pods."""

LARGE_AT_ONCE = 2
"""Large resources of a namespace that are reconciled concurrently."""


def end_at_once() -> None:
    """Exit without any further call to the API server, including those of a graceful shutdown."""
    logging.shutdown()
    os._exit(1)


class Operator:
    """The parts of the operator's process. Create, start and stop it in one event loop.

    ``on_lost`` is called after another operator has become the leader. Raises: SettingsError.
    """

    def __init__(
        self, settings: Settings, features: Sequence[Feature] = (), *, on_lost: Callable[[], None] = end_at_once
    ) -> None:
        self.settings = settings
        self.store = ObjectCache()
        self.metrics = OperatorMetrics(lambda: float(len(self.queue)), lambda: self.store.bodies(KIND))
        schema = build_schema(tuple(features))
        kinds = (*CHILD_KINDS, *sorted(schema.shared_kinds))
        self._shared_kinds = schema.shared_kinds
        self._watched = [(kind, where) for kind in kinds for where in settings.namespaces or (None,)]
        self.client = ApiClient(
            self.login,
            qps=settings.qps,
            burst=settings.burst,
            timeout=settings.call_timeout,
            unheard=settings.lease_seconds * (1 - FENCE_SHARE),
            watches=len(self._watched),
            on_call=self.metrics.on_call,
        )
        context = partial(ServiceContext, self.client, self.store, settings.namespaces, self._on_change)
        try:
            hooks = Hooks(features, start_services(features, settings.features, context))
        except InvalidManifest as error:
            raise SettingsError(str(error)) from None
        self._services = hooks.services
        self.cluster = KubeCluster(self.client, self.store, on_change=self._on_change, hooks=hooks)
        self.reconciler = PlacingReconciler(
            self.cluster,
            turns=FairTurns(),
            progress_interval=settings.progress_interval,
            hooks=hooks,
            followers=(partial(report_changes, hooks.conditions), StatusReports(self.metrics.on_transition).follow),
        )
        self.queue: WorkQueue[Key] = WorkQueue(
            self._reconcile,
            workers=settings.workers,
            pause=self._compute_pause,
            group=lambda key: key.namespace,
            on_result=self.metrics.on_reconcile,
        )
        self.sync = Resync(
            self.client,
            self.store,
            namespaces=settings.namespaces,
            interval=settings.resync_interval,
            on_change=self._on_change,
            kinds=kinds,
        )
        self.health = HealthServer(self.metrics, port=settings.health_port, alive=self._alive, ready=self._ready)
        self.leader: Leader | None = None
        self.metrics.leads.set_function(lambda: float(self.leader is not None and self.leader.leads))
        self._large_gates: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._on_lost = on_lost
        self._arrived: dict[Key, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def login(self) -> kopf.ConnectionInfo:
        """Read the credentials, for the operator's client and for Kopf."""
        return await login(self.settings.kubeconfig)

    async def start(self) -> None:
        """Check the cluster, wait until this operator is the leader, then start the workers. Raises: StartupError."""
        load_launcher()  # takes 0.1 s; cached for the first job
        gc.collect()
        gc.freeze()  # later collections skip all that the imports created
        # Kopf leaves each event with its resource in a reference cycle. The second collection finds nothing, so that
        # later full ones do not wait until a quarter of the frozen objects has been created again.
        gc.collect()
        gc.set_threshold(2_000, 5, 2)
        await self.health.start()
        home = (await self.client.connect()).default_namespace or DEFAULT_NAMESPACE
        await check_cluster(self.client, self.settings.namespaces, home=home, shared_kinds=self._shared_kinds)
        self.leader = Leader(
            client=self.client,
            namespace=home,
            name=self.settings.lease_name,
            identity=self.settings.identity or new_identity(),
            duration=self.settings.lease_seconds,
            pod_uid=self.settings.pod_uid,
            on_lost=self._on_lost,
        )
        self.client.fence = self.leader.remaining
        await self.leader.acquire()
        self._tasks = [
            asyncio.create_task(self.sync.run(), name="synchroniser"),
            asyncio.create_task(self._start_workers(), name="start of the workers"),
        ]
        for kind, namespace in self._watched:
            watching = watch(self.client, kind, namespace, CHILD_SELECTOR, self.on_event)
            self._tasks.append(asyncio.create_task(watching, name=f"watch of {kind}s"))

    async def find_loss(self) -> str | None:
        """Return the requirement that was deleted while the operator ran, such as the CRD; None: nothing is missing."""
        if self.leader is None or not self.leader.leads:
            return None
        return await find_loss(self.client)

    async def stop(self) -> None:
        """Cancel all own tasks and close all connections. Kopf waits five seconds for remaining tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.queue.stop()
        await self.cluster.close()
        if self.leader is not None:
            await self.leader.release()
        await self.client.close()
        await self.health.stop()
        await close_services(self._services)

    def on_event(self, kind: str, event_type: str | None, obj: Any) -> None:
        """Apply a watch event to the cache. ``event_type`` is None for an object of a list."""
        if event_type == "DELETED":
            key = self.store.remove(kind, obj)
        else:
            meta = obj["metadata"]
            if event_type is None and self.store.entry(kind, meta.get("namespace", ""), meta["name"]) is not None:
                self.sync.nudge()  # a cached object was listed: a watch restarted and may have missed deletions
            key = self.store.apply(kind, obj)
        self._time_start(kind, event_type, obj["metadata"])
        if key is None:
            return
        self._on_change(key)
        if event_type == "DELETED" and not key.name:  # the jobs of the namespace share it
            for (_, namespace, name), _ in list(self.store.entries(KIND, [key.namespace]).values()):
                self._on_change(Key(namespace, name))

    def _time_start(self, kind: str, event_type: str | None, meta: Any) -> None:
        """Measure the time from the event of a new resource to the event of its first Job."""
        key = key_of(kind, meta)
        if key is None:
            return
        now = asyncio.get_running_loop().time()
        if kind == KIND and event_type == "ADDED":
            self._arrived[key] = now
            if len(self._arrived) > MOST_ARRIVED:
                del self._arrived[next(iter(self._arrived))]  # the oldest
        elif kind == KIND and event_type == "DELETED":
            self._arrived.pop(key, None)
        elif kind == "Job" and event_type == "ADDED" and key in self._arrived:
            self.metrics.create_to_job.observe(now - self._arrived.pop(key))

    def _on_change(self, key: Key) -> None:
        if key.name:  # shared objects have a key without a name; the passes of their jobs read them
            self.queue.add(key)

    async def _reconcile(self, key: Key) -> float | None:
        """Run one pass. Of a namespace's large resources, which take much memory, few have one at a time."""
        if not self.store.is_large(key):
            return await self.reconciler.reconcile(key)
        gate = self._large_gates.setdefault(key.namespace, asyncio.Semaphore(LARGE_AT_ONCE))
        with lend_worker():
            await gate.acquire()
        try:
            return await self.reconciler.reconcile(key)
        finally:
            gate.release()

    def _compute_pause(self, key: Key) -> float:
        return max(SHORTEST_PAUSE, min(LONGEST_PAUSE, PAUSE_PER_CHILD * self.store.count_children(key)))

    async def _start_workers(self) -> None:
        await self.sync.synced.wait()
        await prepare_services(self._services)  # before the first Job, which may depend on them
        for name, service in self._services.items():
            self._tasks.append(asyncio.create_task(run_service(name, service), name=f"feature {name}"))
        logger.info("ready: serving %s", ", ".join(self.settings.namespaces) or "all namespaces")
        self.queue.start()

    def _alive(self) -> str | None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return f"{task.get_name()} ended: {task.exception()}"
        if self.sync.synced.is_set() and not self.queue.alive and self._tasks and self._tasks[1].done():
            return "a reconcile ended unexpectedly"
        return None

    def _ready(self) -> str | None:
        if self.leader is not None and self.leader.follows:
            return None  # on standby, ready to become the leader
        return None if self.sync.synced.is_set() else "the caches are not synchronized yet"
