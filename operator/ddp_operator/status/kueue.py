"""What Kueue says of a Job that waits: the conditions of its Workload, and of the LocalQueue that it is in. Pure.

The types of the conditions are the same in all versions. Their reasons are not: 0.19 has one for each obstacle where
earlier versions say ``Pending`` of all, also of what is never admitted as the queue and the job are.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddp_operator.constants import KUEUE_PRIORITY_LABEL, KUEUE_QUEUE_LABEL
from ddp_operator.status import conditions as c
from ddp_operator.status.observation import Problem

QUEUE_REASONS: Final = (
    c.QUOTA_PENDING,
    c.INADMISSIBLE,
    c.QUEUE_STOPPED,
    c.WORKLOAD_FINISHED,
    c.WORKLOAD_DEACTIVATED,
    c.WORKLOAD_MISSING,
)
"""Those of Scheduled that come from here."""
# Of QuotaReserved: those that do not go while queue and job are as they are. The first is of all versions.
_INADMISSIBLE = (
    c.INADMISSIBLE,
    "Misconfigured",
    "AdmissionGated",
    "ExceedsMaxQuota",
    "NoMatchingFlavor",
)
_STOPPED = ("Suspended", "OnHold")
# Before 0.19 only the message tells. It has an obstacle for each flavor, and one that others will free is enough.
_PENDING = "Pending"
_NEVER = re.compile(
    r"request > maximum capacity|untolerated taint|doesn't match|unavailable in ClusterQueue|flavor \S+ not found"
    r"|validation failed|didn't satisfy LimitRange"
)
_IN_TIME = re.compile(r"more needed|topology|preempt", re.IGNORECASE)
_NOT_ACTIVE = re.compile(r"(?:is inactive|is stopped)$")
_MAX_WORDS = 1024


def line(text: Any) -> str:
    """Return others' words in one line of a limited length."""
    return " ".join(str(text or "").split())[:_MAX_WORDS]


def explain_waiting(
    job: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]], queue: Mapping[str, Any] | None = None
) -> Problem | None:
    """Return why Kueue does not let a Job, or all its pods, run, with a reason of Scheduled; None: it does not say.

    ``queue``: the LocalQueue that the Job names, where it can be read.
    """
    if not workloads:
        return _name_missing_workload(job)
    # An elastic Job has one more for each size; the former ones have ended.
    workload = max(workloads, key=lambda one: (not _true(one, "Finished"), _created(one)))
    name, spec, status = workload["metadata"]["name"], workload.get("spec") or {}, workload.get("status") or {}
    finished, evicted = _true(workload, "Finished"), _true(workload, "Evicted")
    if finished:
        why = f"{finished.get('reason')}: {line(finished.get('message'))}"
        return Problem(c.WORKLOAD_FINISHED, f"its Workload {name} has ended ({why})")
    if spec.get("active") is False:
        cause = line(evicted.get("message")).removeprefix("The workload is deactivated").strip()
        return Problem(
            c.WORKLOAD_DEACTIVATED, f"its Workload {name} is deactivated {cause or '(spec.active is false)'}"
        )
    again = f"; it was evicted ({evicted.get('reason')})" if evicted else ""
    if _true(workload, "QuotaReserved"):
        if evicted:
            return Problem(c.QUOTA_PENDING, f"{line(evicted.get('message'))}; its pods end first")
        checks = [
            f"{check['name']}{f' ({words})' if (words := line(check.get('message'))) else ''}"
            for check in status.get("admissionChecks") or []
            if check.get("state") != "Ready"
        ]
        waits = f"quota is reserved; waiting for admission check {', '.join(checks)}"
        return Problem(c.QUOTA_PENDING, waits) if checks else None
    if held := _find_hold(queue):
        return Problem(held.reason, held.message + again)
    if at := (status.get("requeueState") or {}).get("requeueAt"):
        return Problem(c.QUOTA_PENDING, f"{line(evicted.get('message'))}; it is queued again at {at}")
    reserved = _condition(workload, "QuotaReserved")
    reason, message = str(reserved.get("reason")), line(reserved.get("message"))
    stopped = reason in _STOPPED or _NOT_ACTIVE.search(message) is not None
    if queue is not None and _NOT_ACTIVE.search(message):
        message = ""  # it is active again, and Kueue has not said more of this Workload since
    if not message:
        return Problem(c.QUOTA_PENDING, again.removeprefix("; ")) if again else None
    never = reason in _INADMISSIBLE or (reason == _PENDING and _NEVER.search(message) and not _IN_TIME.search(message))
    fewest = max((pods.get("minCount") or 0 for pods in spec.get("podSets") or ()), default=0)
    if fewest and "request > maximum capacity" in message:  # said of all of its pods
        return Problem(c.QUOTA_PENDING, f"there is no room yet for {fewest} pods, its least number{again}")
    if stopped:
        return Problem(c.QUEUE_STOPPED, message + again)
    if reason == c.INADMISSIBLE and not spec.get("queueName"):
        message = "the Job names no LocalQueue, and the namespace has none called default"
    return Problem(c.INADMISSIBLE if never else c.QUOTA_PENDING, message + again)


def _find_hold(queue: Mapping[str, Any] | None) -> Problem | None:
    """Return why a LocalQueue admits nothing: Kueue tells the Workloads that wait in it later, and not all of them."""
    if queue is None:
        return None
    name, spec, active = queue["metadata"]["name"], queue.get("spec") or {}, _condition(queue, "Active")
    if (policy := spec.get("stopPolicy") or "None") != "None":
        return Problem(c.QUEUE_STOPPED, f"LocalQueue {name} is held (spec.stopPolicy is {policy})")
    if active.get("status") != "False":
        return None
    cluster_queue = f"ClusterQueue {spec.get('clusterQueue')} of LocalQueue {name}"
    if active.get("reason") == "ClusterQueueDoesNotExist":
        return Problem(c.INADMISSIBLE, f"{cluster_queue} does not exist")
    return Problem(c.QUEUE_STOPPED, f"{cluster_queue} is not active: it is held, or what it names is missing")


def _name_missing_workload(job: Mapping[str, Any]) -> Problem | None:
    """Return that Kueue has made no Workload for a Job that has its label, and what it may have stumbled over."""
    labels = job["metadata"].get("labels") or {}
    if KUEUE_QUEUE_LABEL not in labels:
        return None  # somebody else may have suspended it
    pod = (job["spec"].get("template") or {}).get("spec") or {}
    priority = f"WorkloadPriorityClass {labels[KUEUE_PRIORITY_LABEL]}" if KUEUE_PRIORITY_LABEL in labels else ""
    if not priority and pod.get("priorityClassName"):
        priority = f"PriorityClass {pod['priorityClassName']}"
    checks = f"check that {priority} exists and that Kueue is running" if priority else "check that Kueue is running"
    return Problem(c.WORKLOAD_MISSING, f"Kueue has created no Workload for it; {checks}")


def _condition(item: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def _true(item: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition where it is true, else nothing."""
    found = _condition(item, kind)
    return found if found.get("status") == "True" else {}


def _created(item: Mapping[str, Any]) -> str:
    return str(item["metadata"].get("creationTimestamp") or "")
