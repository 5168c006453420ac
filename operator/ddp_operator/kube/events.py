"""Events: read those about waiting objects, and post own Events in the background.

To find the Events about one object, an API server reads all Events of the namespace. For a thousand Jobs with forbidden
pods that would take most of its time. So the Events about all Jobs of a namespace are read in one list, which is reused
for some seconds.

A reconcile does not wait until an own Event is posted: one task posts them one after another.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final
from weakref import WeakValueDictionary

from ddp_operator.api.cluster import Event, Object
from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import MANAGED_BY
from ddp_operator.api.display_texts import format_micro_time
from ddp_operator.api.faults import parse_each
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.kube.client import ApiClient, call, pages
from ddp_operator.kube.resources import POSTED_EVENT, type_of
from ddp_pod.contract.credentials import hide_credentials

logger = logging.getLogger(__name__)

LIMIT: Final = 50
"""Maximum Events about one object."""
PAGE: Final = 500
MOST: Final = 20 * PAGE
LISTS: Final = 3
"""Maximum lists that are read at the same time."""
MOST_KEPT: Final = LISTS * MOST
"""Maximum Events of all namespaces together, cached or being read. Users can create any number of Events."""
AGE: Final = 5.0
ABOUT_JOBS: Final = "involvedObject.kind=Job,reason=FailedCreate"

_READ: Final = ("type", "reason", "message", "lastTimestamp", "eventTime", "series")

BACKLOG: Final = 4000
NOTE_LIMIT: Final = 1024
"""Maximum bytes of an Event's text. The API server refuses longer ones."""
INSTANCE_LIMIT: Final = 128
CLOSE_TIMEOUT: Final = 1.0
NAME_LIMIT: Final = 253 - len(".0123456789abcdef")


class EventReader:
    """Reads the Events about an object. ``clock`` is monotonic, in seconds."""

    def __init__(self, client: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._cached: dict[str, tuple[float, dict[str, list[Object]]]] = {}
        """By namespace: the time of the list, and the Events about Jobs by their UIDs."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By namespace, while a pass reads its list."""
        self._lists = asyncio.Semaphore(LISTS)
        self._under_way = 0
        """Lists that are being read."""

    async def about(self, item: Object) -> tuple[Object, ...]:
        """Return the Events about a Job, a pod, or an object of which only the name is known.

        Raises: ClusterError, Refused.
        """
        meta = item["metadata"]
        namespace = meta["namespace"]
        if item["kind"] == "Job":
            return tuple((await self._about_jobs(namespace)).get(meta["uid"], ())[-LIMIT:])
        selector = f"involvedObject.kind={item['kind']},involvedObject.name={meta['name']}"
        if "uid" in meta:
            selector = f"involvedObject.uid={meta['uid']}"
        return tuple(await self._list(namespace, selector, LIMIT, LIMIT))

    async def _about_jobs(self, namespace: str) -> dict[str, list[Object]]:
        """Return the Events about Jobs of a namespace by their UIDs, from a list that is at most AGE seconds old."""
        # Of the namespace alone: a tenant with thousands of Events, whose list takes long, delays no other one.
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            self._drop_expired()
            if namespace not in self._cached:
                async with self._lists:
                    self._cached[namespace] = await self._read_jobs(namespace)
            return self._cached[namespace][1]

    async def _read_jobs(self, namespace: str) -> tuple[float, dict[str, list[Object]]]:
        """Return the time and the Events about Jobs of a namespace. Makes room for them before, in memory."""
        now = self._clock()
        self._under_way += 1
        try:
            self._make_room()
            by_uid: dict[str, list[Object]] = {}
            listed = await self._list(namespace, ABOUT_JOBS, PAGE, MOST)
            for uid, event in parse_each("Event", listed, _parse_event):
                by_uid.setdefault(uid, []).append(event)
            return now, by_uid
        finally:
            self._under_way -= 1

    def _drop_expired(self) -> None:
        now = self._clock()
        for expired in [name for name, (read_at, _) in self._cached.items() if now - read_at >= AGE]:
            del self._cached[expired]

    def _make_room(self) -> None:
        while self._cached and self._count_cached() + self._under_way * MOST > MOST_KEPT:
            oldest = min(self._cached, key=lambda name: self._cached[name][0])
            del self._cached[oldest]

    def _count_cached(self) -> int:
        return sum(len(events) for _, by_uid in self._cached.values() for events in by_uid.values())

    async def _list(self, namespace: str, selector: str, limit: int, most: int) -> list[Object]:
        params = {"fieldSelector": selector, "limit": str(limit)}
        events: list[Object] = []
        async for page in pages(self._client, "Event", namespace, params, refusable=True):
            events += page.get("items") or ()
            if len(events) >= most:
                break
        return events


def _parse_event(event: Object) -> tuple[str, Object]:
    """Return the UID of the object that an Event is about, and the Event with the fields that the operator reads."""
    uid = str((event.get("involvedObject") or {}).get("uid") or "")
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return uid, {name: event[name] for name in _READ if name in event} | {"metadata": {"creationTimestamp": created}}


class EventWriter:
    """Posts Events in the background: a bounded queue, and a task that the first Event starts."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(BACKLOG)
        self._task: asyncio.Task[None] | None = None
        self._last_number = 0
        self._instance = socket.gethostname()[:INSTANCE_LIMIT]

    def put(self, resource: Object, event: Event) -> None:
        """Queue an Event. It is dropped if the queue is full: Events are best effort."""
        now = utc_now()
        self._last_number = max(self._last_number + 1, int(now.timestamp() * 1_000_000))
        try:
            self._queue.put_nowait(build_event(resource, event, now, self._last_number, instance=self._instance))
        except asyncio.QueueFull:
            logger.debug("dropped an event: %s", event)
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="event writer")

    async def close(self) -> None:
        """Post waiting Events for at most ``CLOSE_TIMEOUT`` seconds, then stop."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._queue.join()
        except TimeoutError:
            logger.debug("dropped %d events", self._queue.qsize())
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _run(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                params = {"fieldManager": MANAGED_BY}
                await call(
                    self._client, "POST", POSTED_EVENT, event["metadata"]["namespace"], params=params, body=event
                )
            except ClusterError as exc:
                logger.debug("lost an event: %s", exc)
            finally:
                self._queue.task_done()


def build_event(
    resource: Object, event: Event, now: datetime, number: int, *, instance: str = MANAGED_BY
) -> dict[str, Any]:
    """Return the Event of a transition, of ``events.k8s.io``. ``kubectl describe`` shows it as an Event of ``v1``.

    ``number`` makes its name unique. ``instance``: the name of the operator's pod.
    """
    meta = resource["metadata"]
    reference = {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "namespace": meta.get("namespace", ""),
        "name": meta["name"],
        "uid": meta["uid"],
        "resourceVersion": meta.get("resourceVersion", ""),
    }
    return type_of(POSTED_EVENT) | {
        # Events about a node are in the default namespace.
        "metadata": {
            "name": f"{meta['name'][:NAME_LIMIT]}.{number:016x}",
            "namespace": meta.get("namespace", "default"),
        },
        "regarding": reference,
        "type": event.type,
        "reason": event.reason,
        "action": "Reconcile",
        "note": _trim_bytes(hide_credentials(event.message), NOTE_LIMIT),
        "eventTime": format_micro_time(now),
        "reportingController": MANAGED_BY,
        "reportingInstance": instance,
    }


def _trim_bytes(text: str, limit: int) -> str:
    """Return the text, cut to ``limit`` bytes of UTF-8 with an ellipsis."""
    if len(text.encode()) <= limit:
        return text
    ellipsis = "…"
    return text.encode()[: limit - len(ellipsis.encode())].decode(errors="ignore") + ellipsis
