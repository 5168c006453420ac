"""The pass: observe, decide, execute, write the status and tell what changed.

Every event calls the same ``reconcile``; it reads what is and moves it towards what status says shall be. It knows only
the ``Cluster`` protocol, so the same code runs jobs on an API server and on this machine.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

import msgspec
from msgspec.structs import replace

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import Profile, Status
from ddp_operator.cluster import Cluster, ClusterError, Conflict, Event, Key, Object, Refused, Snapshot
from ddp_operator.kubeobjects import utc_now
from ddp_operator.reconcile.claims import find_claimed_gpus
from ddp_operator.reconcile.executor import Executor
from ddp_operator.reconcile.node_reports import NodeReports
from ddp_operator.reconcile.observer import Memory, Observer, seconds_since
from ddp_operator.reconcile.profiles import find_profile, refuse_changes
from ddp_operator.status import conditions as c
from ddp_operator.status.decide import decide, is_finished, report_refused, report_unreadable
from ddp_operator.status.decision import AT_ONCE, Refusal
from ddp_operator.status.history import extend_history
from ddp_operator.status.refused_status import describe_refused_status, report_refused_status, shorten_status
from ddp_operator.status.transitions import NodeFailed, Transition, find_transitions, is_minor_change, transition_events

logger = logging.getLogger(__name__)

MINOR_INTERVAL = 30.0
"""Seconds between two writes of one status that change nothing which `kubectl get` prints."""
# Whoever changed the resource meanwhile will be heard of by an event; this is in case that event was it.
_AFTER_CONFLICT = 0.5
# Until a status that the API server refuses is written again; what helps is done to the definition or to the spec.
_AFTER_REFUSED_STATUS = 60.0
# A timer that fires a little early shall find that it is due.
_EARLY = 0.9
# Until a spec that this version cannot read is read again: what helps is done to the definition.
_AFTER_UNREADABLE = 300.0
# Until a profile or a claim that is not there, or does not complete the job, is looked at again.
_AFTER_NO_PROFILE = 10.0


class StatusRefused(Exception):
    """The API server refuses the status, which is reported; nothing else can be done for the job until it does not."""


class Reconciler:
    """Reconciles resources of one cluster. What it remembers of them a restart may lose."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], datetime] = utc_now,
        progress_interval: float = 10.0,
        defaults: Profile | None = None,
        on_transition: Callable[[str, Transition], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._progress_interval = progress_interval
        self._defaults = defaults
        self._observer = Observer(cluster, clock, progress_interval)
        self._executor = Executor(cluster, clock)
        self._on_transition = on_transition
        self._node_reports = NodeReports()
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
        except StatusRefused:
            return _AFTER_REFUSED_STATUS

    async def _pass(self, key: Key, *, fresh: bool = False) -> float | None:
        """Make one pass; ``fresh``: on what the API server has, not on a cache. Raises: Conflict, ClusterError."""
        snapshot = await (self._cluster.fetch(key) if fresh else self._cluster.observe(key))
        if snapshot is None:
            self._forget(key)
            return None
        memory = self._memory[key]
        if "deletionTimestamp" in snapshot.resource["metadata"]:
            return None  # owner references take the children away
        profile = await find_profile(self._cluster, snapshot, self._defaults)
        if isinstance(profile, Refusal):
            return await self._tell(key, snapshot, report_refused(snapshot.resource, profile, self._clock()))
        if profile is not None or "profile" in (snapshot.resource.get("status") or {}):
            status = parse_status(snapshot.resource)
            if status.profile != profile:  # taken before anything is made of it
                await self._write(key, snapshot.resource, status, replace(status, profile=profile), memory)
                return AT_ONCE
        try:
            job = memory.parse(snapshot.resource, profile)
        except InvalidManifest as error:
            if not fresh:
                # Another definition shows other fields of the same version of a resource, so that no watch tells of it.
                return await self._pass(key, fresh=True)
            if profile is None:
                statuses = report_unreadable(snapshot.resource, error, self._clock())
                return await self._tell(key, snapshot, statuses, _AFTER_UNREADABLE)
            invalid = Refusal(c.INVALID_SPEC, f"with {profile.kind} {profile.name}".rstrip() + f": {error}")
            return await self._tell(key, snapshot, report_refused(snapshot.resource, invalid, self._clock()))
        claims, unclaimed = await find_claimed_gpus(self._cluster, job, begun=bool(snapshot.jobs)), None
        if isinstance(claims, Refusal):
            if not job.status.attempt:
                return await self._tell(key, snapshot, report_refused(snapshot.resource, claims, self._clock()))
            unclaimed = claims
        elif claims != job.status.claims:  # counted before anything is made of it
            await self._write(key, snapshot.resource, job.status, replace(job.status, claims=claims), memory)
            return AT_ONCE
        observation = await self._observer.observe(key, job, snapshot, memory)
        refusal = refuse_changes(memory.locked) or unclaimed or await self._executor.check(job, observation, memory)
        decision = decide(job, observation, self._clock(), refusal, self._progress_interval)
        if decision.needs_fresh_read and not fresh:
            # Watches may show the Job's end before that of the pod to blame, or of the one that has the last step.
            return await self._pass(key, fresh=True)
        refusal, wait = await self._executor.execute(job, observation, decision.actions, memory)
        if refusal is not None:
            decision = decide(job, observation, self._clock(), refusal, self._progress_interval)
        limit = job.spec.recovery.max_restarts
        postponed = await self._write(key, snapshot.resource, job.status, decision.status, memory, limit)
        if is_finished(decision.status):
            self._forget(key)
        waits = (decision.requeue_after, wait, observation.recheck_after, postponed)
        return min((seconds for seconds in waits if seconds is not None), default=None)

    async def _tell(
        self, key: Key, snapshot: Snapshot, statuses: tuple[Status, Status], again: float = _AFTER_NO_PROFILE
    ) -> float | None:
        """Write that a job cannot be looked at. Returns when it is tried again. Raises: Conflict, ClusterError."""
        old, new = statuses
        postponed = await self._write(key, snapshot.resource, old, new, self._memory[key])
        return None if is_finished(old) else postponed or again

    async def _write(
        self,
        key: Key,
        resource: Object,
        old: Status,
        new: Status,
        memory: Memory,
        limit: int | None = None,
    ) -> float | None:
        """Write ``new`` where it differs from what ``resource`` has, at the version that it was decided on.

        ``limit``: that of counted restarts. Returns in how many seconds it can be written where that has to wait.
        Raises: Conflict, ClusterError.
        """
        if memory.status_shortened:
            new = shorten_status(new)
        if new == old:
            return None
        now = self._clock()
        since = seconds_since(memory.status_written, now)
        if since < MINOR_INTERVAL and is_minor_change(old, new):
            return MINOR_INTERVAL - since
        if seconds_since(memory.status_refused, now) < _AFTER_REFUSED_STATUS * _EARLY:
            raise StatusRefused
        memory.status_written = now
        if not memory.status_shortened:
            new = extend_history(new, now)
        await self._patch_status(key, resource, old, new, memory)
        transitions = find_transitions(old, new, now)
        if self._on_transition is not None:
            for transition in transitions:
                self._on_transition(key.namespace, transition)
        # The status is written, so an event that is lost now is lost; nothing else may be.
        with suppress(ClusterError):
            for event in transition_events(old, new, limit):
                await self._cluster.emit(resource, event)
            for transition in transitions:
                if isinstance(transition, NodeFailed):
                    await self._report_node(transition.node, key.namespace, now)
        return None

    async def _patch_status(self, key: Key, resource: Object, old: Status, new: Status, memory: Memory) -> None:
        """Write a status: shortened, where the API server refuses the whole, else report the refusal.

        Raises: Conflict, ClusterError, StatusRefused.
        """
        version = resource["metadata"]["resourceVersion"]
        try:
            await self._cluster.patch_status(key, msgspec.to_builtins(new), resource_version=version)
            memory.status_refused = None
            return
        except Refused as error:
            message = error.message
        shortened = shorten_status(new)
        if shortened != new:
            with suppress(Refused):
                await self._cluster.patch_status(key, msgspec.to_builtins(shortened), resource_version=version)
                logger.warning("%s: the API server refuses the status, it is shortened: %s", key, message)
                memory.status_shortened = True
                return
        now = self._clock()
        first = memory.status_refused is None
        memory.status_refused = now
        if first:
            logger.warning("%s: %s", key, describe_refused_status(message))
            await self._cluster.emit(resource, Event("Warning", c.STATUS_REFUSED, describe_refused_status(message)))
        report = report_refused_status(old, message, resource, now)
        if report != old:
            with suppress(Refused):
                await self._cluster.patch_status(key, msgspec.to_builtins(report), resource_version=version)
        raise StatusRefused

    async def _report_node(self, node: str, namespace: str, now: datetime) -> None:
        """Post an Event about a node that jobs of two namespaces report within a day, once."""
        if self._node_reports.add(node, namespace, now):
            text = (
                "jobs with GPUs in two namespaces failed on this node within a day, as reported by pods; "
                "verify its GPUs before you cordon it"
            )
            # The kubelet's Events about its node have the name for a UID, and so `kubectl describe node` finds them.
            about = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "uid": node}}
            await self._cluster.emit(about, Event("Warning", "FailsTrainingJobs", text))

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self._observer.forget(key)
