"""Read the Workloads of Kueue for jobs that wait in a queue.

The place of a Workload depends on those of all namespaces. So one list serves all waiting jobs, for a time that grows
with its length.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import msgspec

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.constants import KIND
from ddp_operator.api.faults import parse_each
from ddp_operator.api.kubeobjects import EPOCH, utc_now
from ddp_operator.api.status import Status
from ddp_operator.features.queue_estimate.cluster_queue import QueueContents, QueuedWorkload, Quotas, parse_workload
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import CHUNK, ApiClient, ObjectNotFound, call, pages

MIN_AGE: Final = 15.0
LISTED_PER_SECOND: Final = 100
MOST: Final = 5000
"""Maximum Workloads of the cluster, and LocalQueues: with more, no position is known."""


class _Resource(msgspec.Struct):
    status: Status = msgspec.field(default_factory=Status)


class QueueReader:
    """Reads ClusterQueues and Workloads."""

    def __init__(
        self, client: ApiClient, store: ObjectCache | None, *, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._client = client
        self._store = store
        self._clock = clock
        self._lock = asyncio.Lock()
        self._time = EPOCH
        self._age = 0.0
        """Seconds for which a list, or a refusal, is used."""
        self._refusal: Refused | None = None
        self._queue_names: dict[tuple[str, str], str] = {}
        """ClusterQueues by LocalQueue."""
        self._contents: dict[str, QueueContents] = {}

    async def read(self, namespace: str, name: str) -> QueueContents | None:
        """Return the ClusterQueue of a LocalQueue. Raises: Refused, ClusterError."""
        async with self._lock:
            now = self._clock()
            if abs((now - self._time).total_seconds()) >= self._age:
                self._refusal = None
                self._age = 4 * MIN_AGE
                try:
                    await self._refresh(now)
                except Refused as refusal:
                    self._refusal = refusal
                self._time = now
            if self._refusal is not None:
                raise self._refusal
            return self._contents.get(self._queue_names.get((namespace, name), ""))

    async def read_quotas(self, name: str) -> Quotas:
        """Return the quotas of a ClusterQueue; none if it does not exist. Raises: Refused, ClusterError."""
        for kind in ("ClusterQueue.v1beta2", "ClusterQueue"):
            with suppress(ObjectNotFound):
                return Quotas(await call(self._client, "GET", kind, None, name, refusable=True))
        return Quotas({})

    async def _refresh(self, now: datetime) -> None:
        """Read all LocalQueues and Workloads. Raises: Refused, ClusterError."""
        self._contents = {}
        queues = await self._list("LocalQueue", _parse_queue)
        self._queue_names = dict(queues)
        workloads = await self._list("Workload", parse_workload)
        self._age = max(MIN_AGE, (len(queues) + len(workloads)) / LISTED_PER_SECOND)
        grouped: dict[str, list[QueuedWorkload]] = {}
        for item in workloads:
            grouped.setdefault(item.cluster_queue or self._queue_names.get(item.local_queue, ""), []).append(item)
        for name, items in grouped.items():
            admitted = [item for item in items if item.cluster_queue]
            training = {item.uid: status for item in admitted if (status := self._find_status(item)) is not None}
            self._contents[name] = QueueContents(name, items, training, now)

    async def _list(self, kind: str, parse: Callable[[Any], Any]) -> list[Any]:
        """Return all objects of a kind. Raises: Refused, ClusterError."""
        for version in (f"{kind}.v1beta2", kind):
            items: list[Any] = []
            try:
                async for page in pages(self._client, version, None, {"limit": str(CHUNK)}, refusable=True):
                    items += parse_each(kind, page.get("items") or (), parse)
                    if len(items) > MOST:
                        raise Refused(f"the cluster has more than {MOST} {kind}s", reason="Invalid")
            except ObjectNotFound:
                continue
            return items
        raise Refused("Kueue is not installed", reason="Invalid")

    def _find_status(self, workload: QueuedWorkload) -> Status | None:
        """Return the status of a Workload's training job; None: it is another client's, or another version's."""
        namespace, _ = workload.local_queue
        job = self._store.entry("Job", namespace, workload.job_name) if self._store else None
        resource = self._store.entry(KIND, namespace, job.key.name) if self._store and job else None
        try:
            return msgspec.json.decode(resource.body, type=_Resource).status if resource else None
        except msgspec.ValidationError:
            return None


def _parse_queue(item: Mapping[str, Any]) -> tuple[tuple[str, str], str]:
    """Return namespace and name of a LocalQueue, and its ClusterQueue."""
    meta = item["metadata"]
    return (str(meta["namespace"]), str(meta["name"])), str(item["spec"].get("clusterQueue"))
