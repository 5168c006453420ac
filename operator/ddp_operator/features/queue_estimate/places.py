"""The service of this feature: it views each ClusterQueue once for all jobs that wait in it."""

import asyncio
from typing import Final
from weakref import WeakValueDictionary

from ddp_operator.api.cluster import Object
from ddp_operator.api.faults import contain
from ddp_operator.api.status import QueueStatus
from ddp_operator.decide import conditions as c
from ddp_operator.decide.queue_places import LocatingService, QueuePlace
from ddp_operator.decide.state import Problem
from ddp_operator.features.queue_estimate.estimate import QueueView, view_queue
from ddp_operator.features.queue_estimate.reader import QueueReader

SECONDS_IN_PASS: Final = 5.0
"""Time of a pass to wait for a view. The list of a large cluster may take longer: a later pass has it."""


class QueuePlaces(LocatingService):
    """Tells waiting jobs their places."""

    def __init__(self, reader: QueueReader) -> None:
        self._reader = reader
        self._queues: dict[str, QueueView] = {}
        """By ClusterQueue."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By ClusterQueue, while it is viewed."""
        self._views: dict[tuple[str, str], asyncio.Task[QueueView | None]] = {}
        """Running ones by LocalQueue. They outlive the passes that wait for them."""

    async def close(self) -> None:
        """Cancel the running views."""
        for task in self._views.values():
            task.cancel()

    async def locate(self, workload: Object, before: QueueStatus | None) -> QueuePlace | None:
        """Return the place of a Workload, or that its queue never has enough quota; ``before`` while it is read."""
        local_queue = workload["metadata"]["namespace"], workload["spec"].get("queueName") or ""
        task = self._views.get(local_queue)
        if task is None:
            task = asyncio.create_task(self._view(*local_queue))
            self._views[local_queue] = task
            task.add_done_callback(lambda ended: self._end(local_queue, ended))
        done, _ = await asyncio.wait({task}, timeout=SECONDS_IN_PASS)
        if not done:
            return QueuePlace(before)
        view = task.result()
        if view is None:
            return None
        uid = workload["metadata"]["uid"]
        excess = view.exceeds_quota(uid)
        if excess:
            return QueuePlace(problem=Problem(c.INADMISSIBLE, excess))
        return QueuePlace(view.place(uid, before))

    def _end(self, local_queue: tuple[str, str], task: asyncio.Task[QueueView | None]) -> None:
        del self._views[local_queue]
        if not task.cancelled():
            task.exception()  # the passes that waited have it; without this, one that nobody waits for is logged

    async def _view(self, namespace: str, name: str) -> QueueView | None:
        """Return the queue of a LocalQueue, with estimates for all its jobs. Raises: Refused, ClusterError."""
        contents = await self._reader.read(namespace, name)
        if contents is None:
            return None
        # Of this ClusterQueue alone: a slow read of it delays no job of another one.
        async with self._locks.setdefault(contents.name, asyncio.Lock()):
            known = self._queues.get(contents.name)
            if known is None or known.contents is not contents:
                quotas = await self._reader.read_quotas(contents.name)
                known = QueueView(contents, quotas, {})
                with contain("queue estimate", contents.name):
                    known = await asyncio.to_thread(view_queue, contents, quotas)
                self._queues = {
                    name: view for name, view in self._queues.items() if view.contents.time == contents.time
                }
                self._queues[contents.name] = known
            return known
