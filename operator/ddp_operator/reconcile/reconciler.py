"""The reconcile pass: observe, decide, execute, write the status, emit Events.

Every event leads to the same ``reconcile``, which reads the current state and changes it to the desired state. It uses
only the ``Cluster`` protocol, so the same code runs jobs on an API server and on this machine.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import msgspec

from ddp_operator.api.cluster import Cluster, Event, Key, Object, Snapshot
from ddp_operator.api.cluster_errors import ClusterError, Refused, VersionConflict
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.faults import contain
from ddp_operator.api.job import DDPTrainingJob, find_prebuilt_workload
from ddp_operator.api.kubeobjects import find_foreign_manager, utc_now
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.size import OversizeSpec
from ddp_operator.api.status import Profile, Status
from ddp_operator.api.stored_fields import describe_left_out, read_status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.decide import decide
from ddp_operator.decide.refusals import (
    describe_refused_status,
    refuse_invalid,
    report_refused,
    report_refused_status,
    report_unreadable,
    shorten_status,
)
from ddp_operator.decide.state import Decision, Observation, Refusal
from ddp_operator.decide.writes import is_minor_change
from ddp_operator.reconcile.acting import NO_FEATURES, FeatureHooks
from ddp_operator.reconcile.executor import Executor
from ddp_operator.reconcile.limits import EARLY, seconds_since
from ddp_operator.reconcile.observer import Memory, Observer, digest_resource, record_children
from ddp_operator.reconcile.turns import Payer, Turns

logger = logging.getLogger(__name__)

MINOR_INTERVAL = 30.0
"""Seconds between two writes of a status if no column of `kubectl get` changes."""
# Seconds until the pass after a conflict: the watch event of the other change may have been delivered before.
_AFTER_CONFLICT = 0.5
# Seconds until a refused status is written again; a fix changes the CRDs or the spec.
_AFTER_REFUSED_STATUS = 60.0
# Seconds until a spec that this version cannot read is read again; a fix changes the CRDs.
_AFTER_UNREADABLE = 300.0
# Seconds until a profile that does not exist, or is invalid, is read again.
_AFTER_MISSING_OBJECT = 10.0


Follow = Callable[[Object, Status, Status, datetime], Sequence[tuple[Object, Event]]]
"""Follows a written status: takes the resource, the status before and the new one.

Returns Events, each with the object that it is about.
"""


ReportPass = Callable[[Decision, Observation], Awaitable[float | None]]
"""Follows a pass whose status was written. Returns the seconds until the next one; None: at the next event."""


class StatusRefused(Exception):
    """The API server refuses the status. The operator reports it, and does nothing for the job until it is accepted."""


@dataclass(frozen=True, slots=True)
class CurrentPass:
    """The input of one pass. ``fresh``: the snapshot is from the API server, not from a cache."""

    key: Key
    snapshot: Snapshot
    memory: Memory
    fresh: bool

    @property
    def resource(self) -> Object:
        """The resource as observed."""
        return self.snapshot.resource


@dataclass(frozen=True, slots=True)
class PassEnd:
    """A step ended the pass. ``requeue_after``: seconds until the next pass; None: at the next event."""

    requeue_after: float | None


class Reconciler:
    """Reconciles the resources of one cluster. A restart may lose its memory."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        turns: Turns,
        clock: Callable[[], datetime] = utc_now,
        progress_interval: float = 10.0,
        hooks: FeatureHooks = NO_FEATURES,
        followers: Sequence[Follow] = (),
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._progress_interval = progress_interval
        self._turns = turns
        self._hooks = hooks
        self._observer = Observer(cluster, clock, self._turns, progress_interval, self._hooks)
        self._executor = Executor(cluster, clock, self._turns, self._hooks)
        self._followers = followers
        self._memory: defaultdict[Key, Memory] = defaultdict(Memory)

    async def reconcile(self, key: Key) -> float | None:
        """Run one pass.

        Returns the seconds until the next pass if no event triggers one: None for never, 0 for at once.
        Raises: ClusterError if a call failed that may succeed later; call again after a back-off.
        """
        try:
            return await self._run_pass(key)
        except VersionConflict:
            return _AFTER_CONFLICT
        except StatusRefused:
            return _AFTER_REFUSED_STATUS
        except Refused as error:  # of a write after the status: the job continues without it
            raise ClusterError(error.message) from error

    async def _run_pass(self, key: Key, *, fresh: bool = False) -> float | None:
        """Run one pass. ``fresh``: read from the API server, not from a cache.

        Raises: VersionConflict, ClusterError.
        """
        snapshot = await (self._cluster.fetch(key) if fresh else self._cluster.observe(key))
        if snapshot is None:
            self._forget(key)
            return None
        if "deletionTimestamp" in snapshot.resource["metadata"]:
            return None  # Kubernetes deletes the children by their owner references
        manager = find_foreign_manager(snapshot.resource)
        current = CurrentPass(key, snapshot, self._memory[key], fresh)
        _log_left_out(current)
        if manager is not None:
            return await self._run_elsewhere(current, manager)

        prepared = await self._prepare(current)
        if isinstance(prepared, PassEnd):
            return prepared.requeue_after
        if find_prebuilt_workload(prepared):
            return await self._run_copy(current, prepared)
        return await self._reconcile_job(current, prepared)

    async def _run_elsewhere(self, current: CurrentPass, manager: str) -> float | None:
        """Leave a job to its manager, which creates the pods and writes the status."""
        return None

    async def _run_copy(self, current: CurrentPass, job: DDPTrainingJob) -> float | None:
        """Refuse a job that was copied from another cluster, and whose quota is unknown. Raises: as ``_run_pass``."""
        refusal = Refusal(c.FEATURE_FAULT, "no feature of this operator admits jobs that Kueue has copied")
        return (await self._refuse(current, refusal)).requeue_after

    async def _prepare(self, current: CurrentPass) -> DDPTrainingJob | PassEnd:
        """Return the typed job. Raises: as ``_run_pass``."""
        return await self._parse_job(current)

    def _parse(self, resource: Object, profile: Profile | None) -> DDPTrainingJob:
        """Return the typed job. Raises: InvalidManifest."""
        return parse_resource(resource, self._hooks.schema)

    async def _parse_job(self, current: CurrentPass, profile: Profile | None = None) -> DDPTrainingJob | PassEnd:
        """Return the typed job, completed by its profile. Raises: VersionConflict, ClusterError."""
        verdict = current.memory.unreadable
        digest = digest_resource(current.resource, profile)
        was_refused = verdict.holds(digest, self._clock())
        try:
            verdict.repeat_refusal(digest, self._clock())
            payer = Payer(current.key.namespace)
            return await self._turns.run(payer, self._parse, current.resource, profile)
        except InvalidManifest as error:
            is_oversize = isinstance(error, OversizeSpec)
            if not was_refused:
                verdict.refuse(digest, error, self._clock())
            if not current.fresh and not is_oversize and not was_refused:
                # A new CRD changes the visible fields of stored resources, and no watch reports that.
                return PassEnd(await self._run_pass(current.key, fresh=True))
            if profile is None or is_oversize:
                old, new = report_unreadable(current.resource, error, self._clock())
                return await self._report(current, old, new, _AFTER_UNREADABLE)
            return await self._refuse(current, refuse_invalid(error, f"with {profile.kind} {profile.name}".rstrip()))

    async def _reconcile_job(
        self, current: CurrentPass, job: DDPTrainingJob, report: ReportPass | None = None
    ) -> float | None:
        """Observe, decide, execute and write the status. Returns the seconds until the next pass.

        ``report``: follows the written status. Raises: VersionConflict, ClusterError.
        """
        memory = current.memory
        observation = await self._observer.observe(current.key, job, current.snapshot, memory)
        refusal = await self._executor.check(job, observation, memory)
        payer = Payer(job.namespace, len(observation.pods) + len(observation.orphans))
        hooks = self._hooks.observe(job, memory.faults)
        decision = await self._turns.run(
            payer, decide, job, observation, self._clock(), refusal, self._progress_interval, hooks
        )
        if decision.needs_fresh_read and not current.fresh:
            # Watches may deliver the end of the Job before that of the pod with the root cause or the last step.
            return await self._run_pass(current.key, fresh=True)

        try:
            refusal, wait = await self._executor.execute(job, observation, decision.actions, memory)
        finally:
            memory.built = None
        if refusal is not None:
            decision = await self._turns.run(
                payer, decide, job, observation, self._clock(), refusal, self._progress_interval, hooks
            )

        status = record_children(decision.status, memory)
        postponed = await self._write(current, job.status, status)
        recheck = None if report is None else await report(decision, observation)
        if is_finished(status):
            self._forget(current.key)
        delays = (decision.requeue_after, wait, observation.recheck_after, postponed, recheck)
        return min((delay for delay in delays if delay is not None), default=None)

    async def _refuse(self, current: CurrentPass, refusal: Refusal) -> PassEnd:
        """Write a refusal to the status and end the pass. Raises: VersionConflict, ClusterError."""
        old, new = report_refused(current.resource, refusal, self._clock())
        return await self._report(current, old, new, _AFTER_MISSING_OBJECT)

    async def _report(self, current: CurrentPass, old: Status, new: Status, retry_after: float) -> PassEnd:
        """Write why the job cannot be reconciled and end the pass. Raises: VersionConflict, ClusterError."""
        postponed = await self._write(current, old, new)
        return PassEnd(None if is_finished(old) else postponed or retry_after)

    async def _write(self, current: CurrentPass, old: Status, new: Status) -> float | None:
        """Write ``new`` if it differs from ``old``, the status of the observed resource version.

        Returns the seconds until the write is due, if it is postponed. Raises: VersionConflict, ClusterError,
        StatusRefused.
        """
        memory = current.memory
        if memory.status_shortened:
            new = shorten_status(new)
        if new == old:
            return None
        now = self._clock()
        since_write = seconds_since(memory.status_written, now)
        if since_write < MINOR_INTERVAL and is_minor_change(old, new):
            return MINOR_INTERVAL - since_write
        if seconds_since(memory.status_refused, now) < _AFTER_REFUSED_STATUS * EARLY:
            raise StatusRefused

        memory.status_written = now
        if not memory.status_shortened:
            new = self._hooks.extend(current.key, new, now)
        await self._patch_status(current, old, new)
        await self._publish(current, old, new, now)
        return None

    async def _publish(self, current: CurrentPass, old: Status, new: Status, now: datetime) -> None:
        """Tell who follows written statuses, and emit the Events of the change. A failed call loses Events only."""
        self._hooks.note_status(current.snapshot, old, new, now)
        for follow in self._followers:
            with suppress(ClusterError), contain("Events", str(current.key)):
                for about, event in follow(current.resource, old, new, now):
                    await self._cluster.emit(about, event)

    async def _patch_status(self, current: CurrentPass, old: Status, new: Status) -> None:
        """Write a status. If the API server refuses it, write it shortened, otherwise report the refusal.

        Raises: VersionConflict, ClusterError, StatusRefused.
        """
        key = current.key
        memory = current.memory
        version = current.resource["metadata"]["resourceVersion"]
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
                logger.warning("%s: the API server refused the status; wrote it shortened: %s", key, message)
                memory.status_shortened = True
                return

        now = self._clock()
        is_first = memory.status_refused is None
        memory.status_refused = now
        if is_first:
            description = describe_refused_status(message)
            logger.warning("%s: %s", key, description)
            await self._cluster.emit(current.resource, Event("Warning", c.STATUS_REFUSED, description))
        report = report_refused_status(old, message, current.resource, now)
        if report != old:
            with suppress(Refused):
                await self._cluster.patch_status(key, msgspec.to_builtins(report), resource_version=version)
        raise StatusRefused

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self._observer.forget(key)
        self._hooks.forget(key)


def _log_left_out(current: CurrentPass) -> None:
    """Name the stored fields of the status that cannot be read, once: the job continues without them."""
    stored = read_status(current.resource)
    if stored.left_out and stored.left_out != current.memory.left_out:
        logger.warning("%s: %s; the job continues without", current.key, describe_left_out(stored.left_out))
    current.memory.left_out = stored.left_out
    if stored.state_problem and stored.state_problem != current.memory.state_problem:
        restored = "its counts are restored from status.restarts and the attempt"
        logger.warning("%s: status.operatorState %s; %s", current.key, stored.state_problem, restored)
    current.memory.state_problem = stored.state_problem
