"""Jobs whose pods run in another cluster, and those that were copied from one: a feature decides about both.

The kernel leaves the former to their manager and refuses the latter. This is above it: it decides whether there is a
pass, and reports the result of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from ddp_operator.api.cluster import Cluster, Key, Object
from ddp_operator.api.job import DDPTrainingJob, find_prebuilt_workload
from ddp_operator.api.status import ConditionStatus, Status
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.decide import decide
from ddp_operator.decide.hooks import Faults, Guard, Hooks, Service, name_fault
from ddp_operator.decide.state import Children, Decision, Observation, Outcome, Refusal
from ddp_operator.reconcile.completing import CompletingReconciler
from ddp_operator.reconcile.reconciler import CurrentPass, PassEnd
from ddp_operator.reconcile.turns import Payer, Turns

SECONDS_TO_PLACE: Final = 60.0
"""Limit of a hook that reads and writes what decides where a job's pods run."""


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """A resource in one pass, for a feature that decides in which cluster, and when, its pods run.

    ``conditions``: the types of the features' conditions, each with the status that needs no attention.
    """

    key: Key
    resource: Object
    cluster: Cluster
    turns: Turns
    clock: Callable[[], datetime]
    conditions: Mapping[str, ConditionStatus]


@dataclass(frozen=True, slots=True)
class Queued:
    """The status of a job that waits for another cluster, and the seconds until the next pass."""

    status: Status
    wait: float


class PlacingService(Service):
    """A service that decides where jobs run. Each of its methods is a hook, whose fault makes the job wait."""

    manages: str = ""
    """The value of ``spec.managedBy`` of the jobs whose pods run in another cluster by this service."""

    async def follow(self, context: PlacementContext) -> float | Refusal | None:
        """Return the seconds until the next pass over a resource that it manages; None: it runs in no cluster.

        Raises: Refused, ClusterError.
        """
        return None

    async def enqueue(self, job: DDPTrainingJob, context: PlacementContext) -> Queued | Refusal:
        """Queue a job that it manages and that runs in no cluster. The status of one that has not ended is written.

        Raises: Refused, ClusterError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no queue")

    async def admit(self, job: DDPTrainingJob, context: PlacementContext) -> DDPTrainingJob | Refusal:
        """Return a job that was copied from another cluster as its quota allows. Raises: Refused, ClusterError."""
        return job

    async def report_pass(
        self, job: DDPTrainingJob, decision: Decision, children: Children, context: PlacementContext
    ) -> float | None:
        """Report the written status of such a copy. Returns the seconds until the next pass; None: at the next event.

        Raises: Refused, ClusterError.
        """
        return None


class PlacementHooks:
    """The hooks of the placing services for one pass. ``faults``: of the resource's former passes."""

    def __init__(self, hooks: Hooks, context: PlacementContext, faults: Faults) -> None:
        services = hooks.services.items()
        self._services = {name: service for name, service in services if isinstance(service, PlacingService)}
        self._context = context
        self._guard = Guard(str(context.key), faults)

    def find_manager(self, manager: str) -> str | None:
        """Return the feature that places the jobs of a manager; None: another controller does."""
        return next((name for name, service in self._services.items() if service.manages == manager), None)

    async def follow(self, feature: str) -> float | Refusal | None:
        """Return when to look again at a resource that runs in another cluster; None: it runs in none."""
        call = partial(self._services[feature].follow, self._context)
        refused: float | Refusal | None = name_fault(feature)
        return await self._guard.wait(feature, "follow", call, Outcome, limit=SECONDS_TO_PLACE, default=refused)

    async def enqueue(self, feature: str, job: DDPTrainingJob) -> Queued | Refusal:
        """Let a feature queue a job that runs in no cluster."""
        call = partial(self._services[feature].enqueue, job, self._context)
        refused: Queued | Refusal = name_fault(feature)
        kind = Queued | Refusal
        return await self._guard.wait(feature, "enqueue", call, kind, limit=SECONDS_TO_PLACE, default=refused)

    async def admit(self, job: DDPTrainingJob) -> DDPTrainingJob | Refusal:
        """Return a copied job as the features admit it."""
        for name, service in self._services.items():
            refused: DDPTrainingJob | Refusal = name_fault(name)
            call = partial(service.admit, job, self._context)
            is_copy = partial(_is_copy, job)
            kind = DDPTrainingJob | Refusal
            admitted = await self._guard.wait(
                name, "admit", call, kind, limit=SECONDS_TO_PLACE, default=refused, is_valid=is_copy
            )
            if isinstance(admitted, Refusal):
                return admitted
            job = admitted
        return job

    async def report_pass(self, job: DDPTrainingJob, decision: Decision, children: Children) -> float | None:
        """Let the features report the written status of a copied job. Returns the seconds until the next pass."""
        waits: list[float] = []
        for name, service in self._services.items():
            unset: float | None = SECONDS_TO_PLACE  # after a fault
            call = partial(service.report_pass, job, decision, children, self._context)
            kind = float | None
            wait = await self._guard.wait(name, "report_pass", call, kind, limit=SECONDS_TO_PLACE, default=unset)
            if wait is not None:
                waits.append(wait)
        return min(waits, default=None)


def _is_copy(job: DDPTrainingJob, value: DDPTrainingJob | Refusal) -> bool:
    return isinstance(value, Refusal) or (value.namespace, value.name) == (job.namespace, job.name)


class PlacingReconciler(CompletingReconciler):
    """A reconciler whose features place jobs."""

    async def _run_elsewhere(self, current: CurrentPass, manager: str) -> float | None:
        """Queue a job that a feature runs in another cluster. While it runs there, its status comes from there.

        Raises: VersionConflict, ClusterError.
        """
        placement = self._build_hooks(current)
        feature = placement.find_manager(manager)
        if feature is None:
            return await super()._run_elsewhere(current, manager)
        followed = await placement.follow(feature)
        if isinstance(followed, Refusal):
            return (await self._refuse(current, followed)).requeue_after
        if followed is not None:
            return followed

        prepared = await self._prepare(current)
        if isinstance(prepared, PassEnd):
            return prepared.requeue_after
        job = prepared
        queued = await placement.enqueue(feature, job)
        if is_finished(job.status):  # the other cluster has done what features do
            ended = await self._turns.run(Payer(job.namespace), decide, job, Observation(), self._clock())
            await self._executor.execute(job, Observation(), ended.actions, current.memory)
            self._forget(current.key)
            return ended.requeue_after
        if isinstance(queued, Refusal):
            return (await self._refuse(current, queued)).requeue_after
        await self._write(current, job.status, queued.status)
        return queued.wait

    async def _run_copy(self, current: CurrentPass, job: DDPTrainingJob) -> float | None:
        """Reconcile a job that was copied from another cluster, whose quota a feature reads.

        Raises: VersionConflict, ClusterError.
        """
        placement = self._build_hooks(current)
        admitted = await placement.admit(job)
        if isinstance(admitted, Refusal):
            return (await self._refuse(current, admitted)).requeue_after
        if find_prebuilt_workload(admitted):
            return await super()._run_copy(current, job)
        return await self._reconcile_job(current, admitted, partial(placement.report_pass, admitted))

    def _build_hooks(self, current: CurrentPass) -> PlacementHooks:
        conditions = self._features.conditions
        context = PlacementContext(current.key, current.resource, self._cluster, self._turns, self._clock, conditions)
        return PlacementHooks(self._features, context, current.memory.faults)
