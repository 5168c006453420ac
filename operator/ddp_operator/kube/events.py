"""Events: those of others that are read for objects that do not get on, and our own, posted in the background.

An API server reads all Events of a namespace to find those about one object. A thousand Jobs whose pods are forbidden
would have it do so a thousand times, and most of the operator's time at rest would be theirs. So what the Job
controller says is read for all Jobs of a namespace together, and the answer is good for some seconds.

Nobody's reconcile waits for a line of text to be posted, nor for the API server's time that it takes: while there is
much to do, our own Events wait.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from ddp_operator.cluster import ClusterError, Event, Object
from ddp_operator.constants import MANAGED_BY
from ddp_operator.kube.calls import call, pages
from ddp_operator.kube.client import ApiClient, trim
from ddp_operator.kubeobjects import format_time, utc_now

logger = logging.getLogger(__name__)

LIMIT: Final = 50
"""Events about one object."""
PAGE: Final = 500
MOST: Final = 20 * PAGE
MOST_KEPT: Final = 3 * MOST
"""Events of all namespaces together; anybody who may create Events can have a thousand namespaces full of them."""
AGE: Final = 5.0
ABOUT_JOBS: Final = "involvedObject.kind=Job,reason=FailedCreate"

_READ: Final = ("type", "reason", "message", "lastTimestamp", "eventTime", "series")

BACKLOG: Final = 4000
BUSY: Final = 4
"""With so many calls under way an event waits, but not longer than ``PATIENCE`` seconds."""
PATIENCE: Final = 30.0
PAUSE: Final = 0.1
MESSAGE_LIMIT: Final = 1024  # the API server's own for an Event
CLOSE_TIMEOUT: Final = 1.0
NAME_LIMIT: Final = 253 - len(".0123456789abcdef")


class EventReader:
    """Answers what was said about an object. ``clock`` is monotonic, in seconds."""

    def __init__(self, client: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[str, tuple[float, dict[str, list[Object]]]] = {}
        self._lock = asyncio.Lock()

    async def about(self, item: Object) -> tuple[Object, ...]:
        """Return the Events about a Job or a pod. Raises: ClusterError, Refused."""
        meta = item["metadata"]
        namespace, uid = meta["namespace"], meta["uid"]
        if item["kind"] != "Job":
            return tuple(await self._list(namespace, f"involvedObject.uid={uid}", LIMIT, LIMIT))
        return tuple((await self._about_jobs(namespace)).get(uid, ())[-LIMIT:])

    async def _about_jobs(self, namespace: str) -> dict[str, list[Object]]:
        """Return the Events about Jobs of a namespace by their UIDs; read anew where the answer is too old."""
        async with self._lock:
            now = self._clock()
            for old in [name for name, (asked, _) in self._known.items() if now - asked >= AGE]:
                del self._known[old]
            if namespace not in self._known:
                while self._known and self._count_kept() + MOST > MOST_KEPT:
                    del self._known[min(self._known, key=lambda name: self._known[name][0])]
                found: dict[str, list[Object]] = {}
                for event in await self._list(namespace, ABOUT_JOBS, PAGE, MOST):
                    about = str((event.get("involvedObject") or {}).get("uid") or "")
                    found.setdefault(about, []).append(_trimmed(event))
                self._known[namespace] = now, found
            return self._known[namespace][1]

    def _count_kept(self) -> int:
        return sum(len(events) for _, found in self._known.values() for events in found.values())

    async def _list(self, namespace: str, selector: str, limit: int, most: int) -> list[Object]:
        params = {"fieldSelector": selector, "limit": str(limit)}
        found: list[Object] = []
        async for page in pages(self._client, "Event", namespace, params, refusable=True):
            found += page.get("items") or ()
            if len(found) >= most:
                break
        return found


def _trimmed(event: Object) -> Object:
    """Return what is read of an Event; a thousand of them are kept for some seconds."""
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return {name: event[name] for name in _READ if name in event} | {"metadata": {"creationTimestamp": created}}


class EventWriter:
    """A bounded queue and one task that empties it, started by the first event."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._queue: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue(BACKLOG)
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._last_number = 0

    def put(self, resource: Object, event: Event) -> None:
        """Take an event over. Where too many wait already it is dropped: it is a courtesy, not a record."""
        now = utc_now()
        self._last_number = max(self._last_number + 1, int(now.timestamp() * 1_000_000))
        try:
            since = asyncio.get_running_loop().time()
            self._queue.put_nowait((since, build_event(resource, event, now, self._last_number)))
        except asyncio.QueueFull:
            logger.debug("dropped an event: %s", event)
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="event writer")

    async def close(self) -> None:
        """Give what waits a moment to get out, then stop."""
        if self._task is None:
            return
        self._ending = True
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
            since, event = await self._queue.get()
            while self._is_busy(since):  # noqa: ASYNC110 - the busiest place is not to send messages for this
                await asyncio.sleep(PAUSE)
            try:
                params = {"fieldManager": MANAGED_BY}
                await call(self._client, "POST", "Event", event["metadata"]["namespace"], params=params, body=event)
            except ClusterError as exc:
                logger.debug("lost an event: %s", exc)
            finally:
                self._queue.task_done()

    def _is_busy(self, since: float) -> bool:
        """Tell whether an event that was put at ``since`` (loop time) is to give way to other calls."""
        patient = not self._ending and asyncio.get_running_loop().time() < since + PATIENCE
        return patient and self._client.under_way >= BUSY


def build_event(resource: Object, event: Event, now: datetime, number: int) -> dict[str, Any]:
    """Build the ``v1`` Event of one transition, as ``kubectl describe`` finds it; ``number`` makes its name unique."""
    meta = resource["metadata"]
    stamp = format_time(now)
    reference = {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "namespace": meta.get("namespace", ""),
        "name": meta["name"],
        "uid": meta["uid"],
        "resourceVersion": meta.get("resourceVersion", ""),
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # Those about a node are in the default namespace.
        "metadata": {
            "name": f"{meta['name'][:NAME_LIMIT]}.{number:016x}",
            "namespace": meta.get("namespace", "default"),
        },
        "involvedObject": reference,
        "type": event.type,
        "reason": event.reason,
        "message": trim(event.message, MESSAGE_LIMIT),
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "reportingInstance": "",
    }
