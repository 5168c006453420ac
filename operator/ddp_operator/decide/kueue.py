"""Queues: whether one controls a Job, what it permits, and why Kueue does not admit a Job. Pure.

The operator may delete a Job that a queue suspends and resumes. It changes only fields for which Kueue stops no pod.
All versions of Kueue have the same condition types. Their reasons differ: 0.19 has one for each obstacle, earlier
versions report ``Pending`` for all. Messages are quoted; docs/kueue.md explains why a few are matched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from ddp_operator.api.constants import KUEUE_PRIORITY_LABEL, KUEUE_QUEUE_LABEL, MAX_ANNOTATION
from ddp_operator.api.job import DDPTrainingJob, kueue_metadata
from ddp_operator.decide import conditions as c
from ddp_operator.decide.state import Problem
from ddp_operator.decide.views import JobView

QUEUE_REASONS: Final = (
    c.QUOTA_PENDING,
    c.INADMISSIBLE,
    c.QUEUE_STOPPED,
    c.WORKLOAD_FINISHED,
    c.WORKLOAD_DEACTIVATED,
    c.WORKLOAD_MISSING,
)
"""Reasons of Scheduled that come from this module."""
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
_MAX_LENGTH = 1024


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


def line(text: Any) -> str:
    """Return a message of another component in one line of limited length."""
    return " ".join(str(text or "").split())[:_MAX_LENGTH]


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


def is_queued(job: DDPTrainingJob, view: JobView | None) -> bool:
    """Return whether a client other than the operator suspends and resumes a Job. ``view`` None: it does not exist yet.

    Kueue sets labels. Any other client, and Kueue where it manages Jobs without labels, is recognized by a
    ``spec.suspend`` that the operator has not written.
    """
    if view is None:
        return KUEUE_QUEUE_LABEL in job.labels
    if view.queue or view.admitted:
        return True
    if view.suspend_written is None:  # an older operator created it and recorded suspensions in the status only
        ended = job.status.is_true(c.SUCCEEDED) or job.status.is_true(c.FAILED)
        return view.suspended and not (ended or was_suspending(job))
    return view.suspended != view.suspend_written


def is_resize_waiting(job: DDPTrainingJob, view: JobView | None) -> bool:
    """Return whether a resize waits for a suspension, because the queue would stop or not readmit running pods."""
    current_nodes = job.status.attempt_nodes
    if view is None or job.spec.suspend or job.spec.nodes == current_nodes or not is_queued(job, view):
        return False
    if view.suspended:
        return job.spec.nodes > current_nodes and job.status.first_run_time is not None
    return job.spec.elastic is None or not view.takes_slices


def find_queue_edits(job: DDPTrainingJob, view: JobView) -> dict[str, dict[str, str]]:
    """Return the labels and annotations for Kueue that were set or changed after the Job was created."""
    stored = view.raw.get("metadata") or {}
    changed: dict[str, dict[str, str]] = {}
    for part, texts in kueue_metadata(job).items():
        known = stored.get(part) or {}
        compared = {key: text for key, text in texts.items() if len(text) <= MAX_ANNOTATION}
        changed[part] = {key: text for key, text in compared.items() if known.get(key) != text}
    return {part: values for part, values in changed.items() if values}


def describe_late_edits(job: DDPTrainingJob, view: JobView | None) -> str:
    """Return a note about edits that the queue does not accept while the Job runs, to append to a message."""
    if view is None or view.finished or job.spec.suspend:
        return ""
    edits = []
    queue = job.labels.get(KUEUE_QUEUE_LABEL)
    if queue and queue != view.queue and not view.suspended:
        edits.append(f"queue {queue}")
    if is_resize_waiting(job, view):
        edits.append(f"size {job.spec.nodes}")
    if not edits:
        return ""
    verb = "wait" if len(edits) > 1 else "waits"
    commands = f"ddp suspend {job.name}, then ddp resume {job.name}"
    return f"; {' and '.join(edits)} {verb}, because the queue would stop running pods; to apply: {commands}"


def waits_in_queue(job: DDPTrainingJob, view: JobView | None) -> bool:
    """Return whether a job waits for a queue to admit its Job."""
    return view is not None and view.suspended and not view.finished and not job.spec.suspend and is_queued(job, view)


def was_suspending(job: DDPTrainingJob) -> bool:
    """Return whether the job was suspended or stopping in the previous pass."""
    suspended = job.status.condition(c.SUSPENDED)
    return suspended is not None and (suspended.status == "True" or suspended.reason == c.STOPPING)


def find_waiting_start(job: DDPTrainingJob, attempt_job: JobView | None) -> datetime | None:
    """Return when pods could first exist: the attempt's start, or the last change of its Job's suspension."""
    began = job.status.attempt_time or job.status.start_time
    changed = attempt_job.suspend_changed if attempt_job is not None else None
    return max(filter(None, (began, changed)), default=None)
