"""Why Kueue does not admit a Job, by its Workload and its LocalQueue. Pure.

All versions of Kueue have the same condition types. Their reasons differ: 0.19 has one for each obstacle, earlier
versions report ``Pending`` for all. Messages are quoted; docs/kueue.md explains why a few are matched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.other_kinds import KUEUE_PRIORITY_LABEL
from ddp_operator.decide import conditions as c
from ddp_operator.decide.kueue import line
from ddp_operator.decide.state import Problem

# Reasons of QuotaReserved that last until the queue or the job is changed. The first exists in all versions.
_INADMISSIBLE = (
    c.INADMISSIBLE,
    "Misconfigured",
    "AdmissionGated",
    "ExceedsMaxQuota",
    "NoMatchingFlavor",
)
_STOPPED = ("Suspended", "OnHold")
# Before 0.19 only the message distinguishes these. It lists an obstacle per flavor; one temporary obstacle suffices.
_PENDING = "Pending"
_OVER_CAPACITY = "request > maximum capacity"
_PERMANENT_OBSTACLE = re.compile(
    rf"{_OVER_CAPACITY}|untolerated taint|doesn't match|unavailable in ClusterQueue|flavor \S+ not found"
    r"|validation failed|didn't satisfy LimitRange"
)
_TEMPORARY_OBSTACLE = re.compile(r"more needed|topology|preempt", re.IGNORECASE)
_NOT_ACTIVE = re.compile(r"(?:is inactive|is stopped)$")


class KueueCondition(NamedTuple):
    """A condition of an object of Kueue; the message is one line."""

    status: str = ""
    reason: str = ""
    message: str = ""

    @property
    def is_true(self) -> bool:
        """Whether its status is True."""
        return self.status == "True"


@dataclass(frozen=True, slots=True)
class _Workload:
    """The fields of a Workload that explain why its Job waits."""

    name: str
    queue_name: str
    active: bool
    min_count: int
    """The fewest pods of the Job that may start; 0: all of them."""
    requeue_at: str
    pending_checks: tuple[str, ...]
    finished: KueueCondition
    evicted: KueueCondition
    reserved: KueueCondition

    @property
    def eviction(self) -> str:
        """The reason of the last eviction, to append to a message."""
        return f"; evicted ({self.evicted.reason})" if self.evicted.is_true else ""


def explain_waiting(
    job: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]], queue: Mapping[str, Any] | None = None
) -> Problem | None:
    """Return why Kueue does not admit a Job, or all its pods, with a reason of Scheduled; None: Kueue reports none.

    ``queue``: the LocalQueue of the Job, if the operator may read it.
    """
    if not workloads:
        return _explain_missing_workload(job)
    workload = _parse_workload(find_newest(workloads))

    ended = _explain_end(workload)
    if ended is not None:
        return ended
    if workload.reserved.is_true:
        return _explain_reserved_quota(workload)
    return _explain_hold(workload, queue) or _explain_requeue(workload) or _explain_pending(workload, queue)


def find_newest(workloads: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the Workload that counts. An elastic Job has one per size; the former ones are finished."""
    return max(workloads, key=lambda item: (not find_condition(item, "Finished").is_true, _read_creation(item)))


def _parse_workload(item: Mapping[str, Any]) -> _Workload:
    spec = item.get("spec") or {}
    status = item.get("status") or {}
    return _Workload(
        name=item["metadata"]["name"],
        queue_name=spec.get("queueName") or "",
        active=spec.get("active") is not False,
        min_count=max((pod_set.get("minCount") or 0 for pod_set in spec.get("podSets") or ()), default=0),
        requeue_at=str((status.get("requeueState") or {}).get("requeueAt") or ""),
        pending_checks=tuple(
            _name_check(check) for check in status.get("admissionChecks") or () if check.get("state") != "Ready"
        ),
        finished=find_condition(item, "Finished"),
        evicted=find_condition(item, "Evicted"),
        reserved=find_condition(item, "QuotaReserved"),
    )


def _name_check(check: Mapping[str, Any]) -> str:
    message = line(check.get("message"))
    return f"{check['name']} ({message})" if message else str(check["name"])


def _explain_end(workload: _Workload) -> Problem | None:
    """Return that Kueue ignores a Workload, because it is finished or deactivated."""
    if workload.finished.is_true:
        cause = f"{workload.finished.reason}: {workload.finished.message}"
        return Problem(c.WORKLOAD_FINISHED, f"Workload {workload.name} is finished ({cause})")
    if workload.active:
        return None
    message = f"Workload {workload.name} is deactivated (spec.active is false)"
    if workload.evicted.is_true and workload.evicted.message:
        message += f": {workload.evicted.message}"
    return Problem(c.WORKLOAD_DEACTIVATED, message)


def _explain_reserved_quota(workload: _Workload) -> Problem | None:
    """Return what an admitted Workload, or one with quota, waits for."""
    if workload.evicted.is_true:
        return Problem(c.QUOTA_PENDING, f"{workload.evicted.message}; waiting for its pods to terminate")
    if not workload.pending_checks:
        return None
    checks = ", ".join(workload.pending_checks)
    return Problem(c.QUOTA_PENDING, f"quota is reserved; waiting for admission check {checks}")


def _explain_hold(workload: _Workload, queue: Mapping[str, Any] | None) -> Problem | None:
    """Return why a LocalQueue admits nothing. Kueue updates its Workloads later, and not all of them."""
    if queue is None:
        return None
    name = queue["metadata"]["name"]
    spec = queue.get("spec") or {}
    policy = spec.get("stopPolicy") or "None"
    if policy != "None":
        message = f"LocalQueue {name} is stopped (spec.stopPolicy is {policy})"
        return Problem(c.QUEUE_STOPPED, message + workload.eviction)

    active = find_condition(queue, "Active")
    if active.status != "False":
        return None
    cluster_queue = f"ClusterQueue {spec.get('clusterQueue')} of LocalQueue {name}"
    if active.reason == "ClusterQueueDoesNotExist":
        return Problem(c.INADMISSIBLE, f"{cluster_queue} does not exist{workload.eviction}")
    message = f"{cluster_queue} is not active: it is stopped, or a flavor or admission check that it names is missing"
    return Problem(c.QUEUE_STOPPED, message + workload.eviction)


def _explain_requeue(workload: _Workload) -> Problem | None:
    """Return that an evicted Workload waits for its back-off."""
    if not workload.requeue_at:
        return None
    message = workload.evicted.message if workload.evicted.is_true else ""
    return Problem(c.QUOTA_PENDING, f"{message}; requeued at {workload.requeue_at}")


def _explain_pending(workload: _Workload, queue: Mapping[str, Any] | None) -> Problem | None:
    """Return why a Workload has no quota, in Kueue's message."""
    message = workload.reserved.message
    names_inactive_queue = _NOT_ACTIVE.search(message) is not None
    outdated = names_inactive_queue and queue is not None  # the queue is active again
    if not message or outdated:
        eviction = workload.eviction.removeprefix("; ")
        return Problem(c.QUOTA_PENDING, eviction) if eviction else None

    if workload.min_count and _OVER_CAPACITY in message:
        minimum = f"insufficient quota for the minimum of {workload.min_count} pods; for all pods: {message}"
        return Problem(c.QUOTA_PENDING, minimum + workload.eviction)
    if names_inactive_queue or workload.reserved.reason in _STOPPED:
        return Problem(c.QUEUE_STOPPED, message + workload.eviction)
    if workload.reserved.reason == c.INADMISSIBLE and not workload.queue_name:
        message = "the Job names no LocalQueue, and the namespace has no LocalQueue named default"
    reason = c.INADMISSIBLE if _is_inadmissible(workload.reserved) else c.QUOTA_PENDING
    return Problem(reason, message + workload.eviction)


def _is_inadmissible(reserved: KueueCondition) -> bool:
    """Return whether a Workload stays without quota until the queue or the job is changed."""
    if reserved.reason == _PENDING:
        return _PERMANENT_OBSTACLE.search(reserved.message) is not None and not _TEMPORARY_OBSTACLE.search(
            reserved.message
        )
    return reserved.reason in _INADMISSIBLE


def _explain_missing_workload(job: Mapping[str, Any]) -> Problem | None:
    """Return that Kueue has created no Workload for a Job with its label, and what to check."""
    labels = job["metadata"].get("labels") or {}
    if KUEUE_QUEUE_LABEL not in labels:
        return None  # another client may have suspended it
    pod = (job["spec"].get("template") or {}).get("spec") or {}
    check = "check that Kueue is running"
    if KUEUE_PRIORITY_LABEL in labels:
        check = f"check that WorkloadPriorityClass {labels[KUEUE_PRIORITY_LABEL]} exists and that Kueue is running"
    elif pod.get("priorityClassName"):
        check = f"check that PriorityClass {pod['priorityClassName']} exists and that Kueue is running"
    return Problem(c.WORKLOAD_MISSING, f"Kueue has created no Workload for it; {check}")


def find_condition(item: Mapping[str, Any], kind: str) -> KueueCondition:
    """Return a condition of an object of Kueue, empty if it has none of that type."""
    for condition in (item.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind:
            return KueueCondition(
                status=str(condition.get("status") or ""),
                reason=str(condition.get("reason")),
                message=line(condition.get("message")),
            )
    return KueueCondition()


def _read_creation(item: Mapping[str, Any]) -> str:
    return str(item["metadata"].get("creationTimestamp") or "")
