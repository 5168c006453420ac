"""A job that waits in Kueue, in the cluster in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import QueueStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.hooks import Feature, Hooks, PodHook, Service
from ddp_operator.decide.queue_places import forget_place, locate
from ddp_operator.decide.state import Causes, State
from ddp_operator.reconcile.acting import PodPages
from tests.support.builders import NOW, resource
from tests.support.fake_cluster import ReconcilerHarness


@dataclass(frozen=True, slots=True)
class Place(Causes):
    """The place of a Workload that waits."""

    queue: QueueStatus | None = None


async def _ask(pages: PodPages, former: Place | None) -> Place | None:
    forget_place(pages.hooks)
    view = pages.children.job(pages.job.status.attempt)
    if view is None or not view.suspended:
        return None
    [workload] = await pages.cluster.workloads_of(view.raw)
    place = await locate(pages.hooks, workload, pages.job.status.queue)
    return Place({view.uid: place.problem} if place.problem else {}, place.queue)


def _record(state: State, status: Status) -> Status:
    place = state.observation.find_observed(Place)
    return msgspec.structs.replace(status, queue=place.queue if place is not None else None)


def _explain(attempt: ObservedAttempt, fact: Fact) -> Fact:
    problem = next(iter(attempt.state.observation.problems.values()), None)
    is_known = problem is not None and fact.type == c.SCHEDULED
    return replace(fact, reason=problem.reason, message=problem.message) if problem and is_known else fact


ASKING = Feature(
    "asking", "stable", "x.md", pods=PodHook(Place, _ask, each_pass=True), record=_record, explain=_explain
)
"""Asks for the place in each pass in which a job waits."""


class QueuedJob:
    """A harness whose job has a pending Workload with the UID ``mine`` in the LocalQueue ``q``.

    ``services``: those that may know its place; ``feature``: the one that asks them.
    """

    def __init__(self, services: Mapping[str, Service] | None = None, feature: Feature = ASKING) -> None:
        hooks = Hooks((feature,), services or {})
        self.harness = ReconcilerHarness(resource(labels={KUEUE_QUEUE_LABEL: "q"}, nodes=1), hooks)
        self.harness.cluster.workloads_of = self._list_workloads  # type: ignore[method-assign]
        self.harness.cluster.kueue_object = self._read_queue  # type: ignore[method-assign]

    async def start(self) -> ReconcilerHarness:
        """Create the Job, which Kueue suspends."""
        await self.harness.settle()
        self._suspend(True)
        return await self.wait(60)

    async def admit(self) -> ReconcilerHarness:
        """Resume the Job, as Kueue does."""
        self._suspend(False)
        return await self.wait(1)

    async def wait(self, seconds: float) -> ReconcilerHarness:
        """Let time pass."""
        self.harness.clock.advance(seconds)
        return await self.harness.settle()

    def _suspend(self, suspended: bool) -> None:
        job = self.harness.cluster.store.list("Job")[0]
        self.harness.cluster.store.change(job, spec={**job["spec"], "suspend": suspended})

    async def _list_workloads(self, job: Any) -> Any:
        metadata = {"name": "w", "namespace": "default", "uid": "mine", "creationTimestamp": format_time(NOW)}
        return ({"metadata": metadata, "spec": {"queueName": "q"}},)

    async def _read_queue(self, kind: str, namespace: str | None, name: str) -> Any:
        return {"metadata": {"name": name}, "spec": {"clusterQueue": "gpu"}}
