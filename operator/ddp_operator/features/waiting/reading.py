"""Read what Events and Kueue report about objects of a job that do not start, at limited intervals."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ddp_operator.api.cluster import Object
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.faults import contain, name_object
from ddp_operator.api.kubeobjects import scheduling_gates
from ddp_operator.api.status import QueueStatus
from ddp_operator.decide import conditions as c
from ddp_operator.decide.queue_places import forget_place, locate
from ddp_operator.decide.state import Causes, Observation, Problem
from ddp_operator.decide.views import JobView, PodView
from ddp_operator.features.waiting.events import find_claim_problem, find_latest_warning, list_claims, name_volume
from ddp_operator.features.waiting.polling import compute_event_poll_delay, list_objects_to_inspect
from ddp_operator.manifests.children import build_children
from ddp_operator.reading.workloads import explain_waiting, find_newest
from ddp_operator.reconcile.limits import is_due
from ddp_operator.reconcile.turns import Payer

if TYPE_CHECKING:  # of a pass, which the commands do not have
    from ddp_operator.reconcile.acting import PodPages


@dataclass(frozen=True, slots=True)
class WaitReading(Causes):
    """What was read ``at`` a time, which is kept until the next reading. ``queue``: the place of the job's Workload."""

    at: datetime | None = None
    queue: QueueStatus | None = None


def find_place(observation: Observation) -> QueueStatus | None:
    """Return the place of the job's Workload in its queue; None: it is unknown."""
    reading = observation.find_observed(WaitReading)
    return None if reading is None else reading.queue


async def observe(pages: "PodPages", former: WaitReading | None) -> WaitReading | None:
    """Return why objects of the job do not start; None: all have a reason, or start. Raises: ClusterError."""
    job = pages.job
    uids = list_objects_to_inspect(job, pages.children, pages.now)
    if not uids:
        forget_place(pages.hooks)
        return None
    if former is not None and former.at is not None:
        interval = compute_event_poll_delay(job, pages.children, former.at, pages.waiting_jobs) or 0.0
        if not is_due(former.at, pages.now, interval):
            return former

    forget_place(pages.hooks)
    problems: dict[str, Problem] = {}
    queue = None
    is_gated = any(scheduling_gates(pod.raw) for pod in pages.children.pods_of(job.status.attempt))
    views: tuple[JobView | PodView, ...] = (*pages.children.jobs, *pages.children.pods)
    for view in views:
        if view.uid not in uids:
            continue
        with suppress(Refused), contain("cause of a wait", name_object(view.raw)):
            if isinstance(view, JobView) and (is_gated or view.suspended):
                problem, queue = await _read_queue(pages, view.raw)
            elif isinstance(view, JobView):
                problem = find_latest_warning(await pages.cluster.events_of(view.raw))
            else:
                problem = await _find_pod_problem(pages, view)
            if problem is not None:
                problems[view.uid] = problem
    return WaitReading(problems, pages.now, queue)


async def _find_pod_problem(pages: "PodPages", pod: PodView) -> Problem | None:
    """Return why a pod does not start, with the object behind its volume. Raises: Refused, ClusterError."""
    if pod.waiting_reason != c.UNSCHEDULABLE:
        problem = find_latest_warning(await pages.cluster.events_of(pod.raw))
        return name_volume(problem, await _build_pod_spec(pages)) if problem is not None else None
    for claim in list_claims(await _build_pod_spec(pages)):
        metadata = {"namespace": pages.job.namespace, "name": claim}
        events = await pages.cluster.events_of({"kind": "PersistentVolumeClaim", "metadata": metadata})
        problem = find_claim_problem(claim, events)
        if problem is not None:
            return problem
    return None


async def _build_pod_spec(pages: "PodPages") -> Mapping[str, Any]:
    """Return the spec of the current attempt's pods, empty if it is invalid."""
    status = pages.job.status
    payer = Payer(pages.job.namespace)
    with suppress(InvalidManifest):
        children = await pages.turns.run(
            payer, build_children, pages.job, attempt=status.attempt, nodes=status.attempt_nodes
        )
        pod_spec: Mapping[str, Any] = children[-1]["spec"]["template"]["spec"]
        return pod_spec
    return {}


async def _read_queue(pages: "PodPages", raw: Object) -> tuple[Problem | None, QueueStatus | None]:
    """Return why a Job waits in Kueue, and its place. Raises: Refused if it may not read Workloads."""
    workloads = await pages.cluster.workloads_of(raw)
    queue = None
    name = (raw["metadata"].get("labels") or {}).get(KUEUE_QUEUE_LABEL)
    if name:
        with suppress(Refused):
            queue = await pages.cluster.kueue_object("LocalQueue", raw["metadata"]["namespace"], name)
    problem = explain_waiting(raw, workloads, queue)
    if not workloads or (problem is not None and problem.reason != c.QUOTA_PENDING):
        return problem, None
    place = await locate(pages.hooks, find_newest(workloads), pages.job.status.queue)
    return place.problem or problem, place.queue
