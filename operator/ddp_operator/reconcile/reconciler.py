"""The pass: observe, decide, execute, write the status.

Every event calls the same ``reconcile``; it reads what is and moves it towards what status says shall be. It knows only
the ``Cluster`` protocol, so the same code runs jobs on an API server and on this machine.
"""

from collections import defaultdict
from collections.abc import Callable
from datetime import datetime

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.cluster import Cluster, Conflict, Key
from ddp_operator.kubeobjects.timestamps import utc_now
from ddp_operator.reconcile.executor import Executor
from ddp_operator.reconcile.memory import Memory
from ddp_operator.reconcile.observer import Observer
from ddp_operator.reconcile.status_writer import StatusWriter
from ddp_operator.status.decide import decide, is_finished
from ddp_operator.status.transitions import Transition
from ddp_operator.status.unreadable import report_unreadable

# Whoever changed the resource meanwhile will be heard of by an event; this is in case that event was it.
_AFTER_CONFLICT = 0.5
# Until a spec that this version cannot read is read again: what helps is done to the definition.
_AFTER_UNREADABLE = 300.0


class Reconciler:
    """Reconciles resources of one cluster. What it remembers of them a restart may lose."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], datetime] = utc_now,
        progress_interval: float = 10.0,
        on_transition: Callable[[Transition], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._progress_interval = progress_interval
        self._observer = Observer(cluster, clock, progress_interval)
        self._executor = Executor(cluster, clock)
        self._writer = StatusWriter(cluster, clock, on_transition)
        self._memory: defaultdict[Key, Memory] = defaultdict(Memory)

    async def reconcile(self, key: Key) -> float | None:
        """Make one pass.

        Returns seconds until the next pass is wanted without an event: None for never, 0 for at once.
        Raises: ClusterError where a call failed that may succeed later; call again after a back-off.
        """
        try:
            return await self._pass(key)
        except Conflict:
            return _AFTER_CONFLICT

    async def _pass(self, key: Key, *, fresh: bool = False) -> float | None:
        """Make one pass; ``fresh``: on what the API server has, not on a cache. Raises: Conflict, ClusterError."""
        snapshot = await (self._cluster.fetch(key) if fresh else self._cluster.observe(key))
        if snapshot is None:
            self._forget(key)
            return None
        memory = self._memory[key]
        try:
            job = parse_resource(snapshot.resource)
        except InvalidManifest as error:
            if not fresh:
                # Another definition shows other fields of the same version of a resource, so that no watch tells of it.
                return await self._pass(key, fresh=True)
            old, new = report_unreadable(snapshot.resource, error, self._clock())
            postponed = await self._writer.write(key, snapshot.resource, old, new, memory)
            return None if is_finished(old) else postponed or _AFTER_UNREADABLE
        if job.deleting:
            return None  # owner references take the children away
        observation = await self._observer.observe(key, job, snapshot, memory)
        refusal = await self._executor.check(job, observation, memory)
        decision = decide(job, observation, self._clock(), refusal, self._progress_interval)
        if decision.needs_fresh_read and not fresh:
            # Watches may show the Job's end before that of the pod to blame, or of the one that has the last step.
            return await self._pass(key, fresh=True)
        refusal, wait = await self._executor.execute(job, observation, decision.actions, memory)
        if refusal is not None:
            decision = decide(job, observation, self._clock(), refusal, self._progress_interval)
        limit = job.in_place_restarts if job.spec.elastic is None else None  # else pods that come and go restart it too
        postponed = await self._writer.write(key, snapshot.resource, job.status, decision.status, memory, limit)
        if is_finished(decision.status):
            self._forget(key)
        waits = (decision.requeue_after, wait, observation.recheck_after, postponed)
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self._observer.forget(key)
