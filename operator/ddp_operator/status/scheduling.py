"""The condition Scheduled: which pods wait for what, as reported by who makes them wait.

The scheduler and the kubelet write theirs into a pod's status, Kueue into the Job's Workload. The Job controller, when
it may not create a pod, and the kubelet, when it cannot mount a volume, only post Events: those, and Workloads, are
asked for where an object does not get on.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from ddp_operator import constants, names
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.kubeobjects import scheduling_gates
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact
from ddp_operator.status.kueue import QUEUE_REASONS, line
from ddp_operator.status.observation import Children, Observation, Problem
from ddp_operator.status.views import JobView, PodView
from ddp_operator.status.waiting import describe_late_edits, is_queued, waiting_since, waits_in_queue

# A Job's pods are there within a second; a kubelet starts a container, or says why not, within some more.
_PATIENCE = timedelta(seconds=5)
_LEAST, _MOST = 10.0, 300.0
# A queue may be held, or a Workload deactivated, at any time, and nothing of the Job tells.
_MOST_IN_QUEUE = 60.0
# The Job controller and the scheduler look at a new object within a second, at thousands of them within some more.
_NOTICE = timedelta(seconds=30)
_READS_A_SECOND = 5.0
_MAX_INSPECTED = 3
_GATED = "SchedulingGated"
_SCHEDULER_EVENT = "FailedScheduling"
# What kubelets before 1.32 say between two tries to pull an image.
_PAUSE = "Back-off pulling image "
_TELLING = ("FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", _SCHEDULER_EVENT)
_VOLUME_EVENTS = ("FailedMount", "FailedAttachVolume")
_VOLUME_WORDS = re.compile(r"volume", re.IGNORECASE)
# What the scheduler of Kubernetes 1.36 says of a pod that could be placed if it were not for the rest of its gang.
_GANG_WAITS = "pod group is unschedulable, waiting for "


def describe_scheduling(job: DDPTrainingJob, observation: Observation, attempt: int, nodes: int, now: datetime) -> Fact:
    """Return Scheduled of an attempt that shall have so many pods."""
    fact = _describe_pods(job, observation, attempt, nodes, now)
    edits = describe_late_edits(job, observation.job(attempt))
    reason = c.CHANGE_PENDING if edits and fact.status == "True" else fact.reason
    return replace(fact, reason=reason, message=fact.message + edits)


def _describe_pods(job: DDPTrainingJob, observation: Observation, attempt: int, nodes: int, now: datetime) -> Fact:
    former_alive = observation.former_alive(attempt)
    if former_alive:
        whose = "" if job.spec.suspend else " of the previous attempt"
        message = f"waiting for {former_alive} pods{whose} to terminate"
        since = observation.orphaned_since
        if since is not None and now - since >= _NOTICE:
            message += "; their Job is gone, but nobody deletes them: check that kube-controller-manager is running"
        return Fact(c.SCHEDULED, "False", c.WAITING_FOR_FORMER_PODS, message)
    current, attempt_job = observation.pods_of(attempt).newest.values(), observation.job(attempt)
    problem = observation.problems.get(attempt_job.uid) if attempt_job else None
    waiting = [(pod, *why) for pod in current if pod.alive and (why := _why(pod, observation, problem))]
    if waiting:
        return Fact(c.SCHEDULED, "False", *_describe_waiting(waiting))
    scheduled = sum(pod.scheduled or not pod.alive for pod in current)
    if scheduled >= nodes:
        sidecars = _describe_sidecars(current)
        reason = c.SIDECAR_RESTARTED if sidecars else c.ALL_PODS_SCHEDULED
        return Fact(c.SCHEDULED, "True", reason, f"{nodes}/{nodes} pods scheduled{sidecars}")
    placed = f"{scheduled}/{nodes} pods scheduled"
    if attempt_job is not None and waits_in_queue(job, attempt_job):
        return Fact(c.SCHEDULED, "False", *_describe_queueing(attempt_job, problem))
    partly = attempt_job is not None and is_queued(job, attempt_job) and not attempt_job.takes_slices
    if attempt_job is not None and partly and not job.spares and scheduled >= attempt_job.nodes:
        message = f"its queue has admitted {attempt_job.nodes} of {nodes} pods; those train"
        return Fact(c.SCHEDULED, "False", c.QUOTA_PENDING, message)
    if attempt_job is not None and problem is not None and problem.reason not in QUEUE_REASONS:
        # Each try has a name of its own: the same message again is no news.
        name = re.escape(attempt_job.name)
        message = re.sub(rf"{name}-[0-9]+-{names.POD_SUFFIX}", f"{attempt_job.name}-*", problem.message)
        return Fact(c.SCHEDULED, "False", c.PODS_FORBIDDEN, f"{message} ({placed})")
    reason, absent = _name_the_absent(current, attempt_job, now)
    return Fact(c.SCHEDULED, "False", reason, f"{absent} ({placed})" if absent else placed)


def _describe_waiting(waiting: Sequence[tuple[PodView, str, str]]) -> tuple[str, str]:
    """Return reason and message of pods that wait for a node, an image or a volume."""
    # Of a gang most pods say no more than that they wait for the others: the scheduler's message on one tells why.
    pod, reason, message = min(waiting, key=lambda item: item[2].startswith(_GANG_WAITS))
    others = f" (and {len(waiting) - 1} more pods)" if len(waiting) > 1 else ""
    return reason, f"{pod.name}{others}: {message}"


def _describe_queueing(attempt_job: JobView, problem: Problem | None) -> tuple[str, str]:
    """Return reason and message of a Job that a queue has not admitted yet."""
    known = problem if problem is not None and problem.reason in QUEUE_REASONS else None
    # Without the label it is Kueue where it manages all Jobs, or a hand.
    admission = "Kueue to admit it" if known else "whoever suspended it to resume it"
    if attempt_job.queue:
        admission = f"queue {attempt_job.queue} to admit it"
    because = f": {known.message}" if known else ""
    message = f"Job {attempt_job.name} waits for {admission}{because}"
    return known.reason if known else c.QUOTA_PENDING, message


def _describe_sidecars(pods: Iterable[PodView]) -> str:
    """Return what is to be said of the sidecar that was restarted most often: training goes on beside it."""
    found = [(count, pod.name, name, why) for pod in pods if pod.alive for name, count, why in pod.restarted_sidecars]
    if not found:
        return ""
    count, pod_name, name, why = max(found)
    return f"; sidecar {name} of pod {pod_name}: {count} restarts" + (f" (last reason: {why})" if why else "")


def _name_the_absent(pods: Iterable[PodView], attempt_job: JobView | None, now: datetime) -> tuple[str, str]:
    """Return reason and message where whoever has to act next has not for long; no message: nobody is late."""

    def is_ignored(since: datetime | None) -> bool:
        return since is not None and now - since >= _NOTICE

    if attempt_job is not None and is_ignored(attempt_job.ignored_since):
        message = (
            f"the Job controller has not acted on Job {attempt_job.name}; check that kube-controller-manager is running"
        )
        return c.WAITING_FOR_PODS, message
    ignored = [pod for pod in pods if is_ignored(pod.ignored_since)]
    if ignored:
        others = f" (and {len(ignored) - 1} more pods)" if len(ignored) > 1 else ""
        message = (
            f"{ignored[0].name}{others}: no scheduler has acted on it; check that {ignored[0].scheduler} is running"
        )
        return c.UNSCHEDULABLE, message
    return c.WAITING_FOR_PODS, ""


def objects_to_inspect(job: DDPTrainingJob, children: Children, now: datetime) -> tuple[str, ...]:
    """Return the UIDs of the Job and the pods about which others may have said more than their status does."""
    found = [uid for uid, since in _silent_objects(job, children) if now - since >= _PATIENCE]
    return tuple(found[:_MAX_INSPECTED])


def event_poll_delay(job: DDPTrainingJob, children: Children, now: datetime, polling_jobs: int) -> float | None:
    """Return in how many seconds those objects' Events are to be read; None: there are no such objects.

    All jobs that wait share a number of reads a second.
    """
    since = [since for _, since in _silent_objects(job, children)]
    if not since:
        return None
    waited = now - min(since)
    if waited < _PATIENCE:
        return max(1.0, (_PATIENCE - waited).total_seconds())
    most = _MOST_IN_QUEUE if waits_in_queue(job, children.job(job.status.attempt)) else _MOST
    return max(min(most, max(_LEAST, waited.total_seconds() / 2)), polling_jobs / _READS_A_SECOND)


def find_pull_errors(pods: Iterable[PodView], known: Mapping[str, str]) -> dict[str, str]:
    """Return why images are not there, by the UIDs of the pods that wait for them. ``known``: at the last look."""
    waiting = {pod.uid: pod.waiting_message for pod in pods if pod.waiting_reason == c.IMAGE_PULL}
    return {uid: known.get(uid, said) if said.startswith(_PAUSE) else said for uid, said in waiting.items()}


def latest_warning(events: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return the latest warning that says why an object does not get on."""
    warnings = [event for event in events if event.get("type") == "Warning" and event.get("reason") in _TELLING]
    if not warnings:
        return None
    latest = max(warnings, key=event_time)
    return Problem(str(latest["reason"]), line(latest.get("message")))


def event_time(event: Mapping[str, Any]) -> str:
    """Return when an Event was last seen, as RFC 3339, or an empty string."""
    series = event.get("series") or {}
    metadata = event.get("metadata") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((str(time) for time in (*times, metadata.get("creationTimestamp")) if time), default="")


def _why(pod: PodView, observation: Observation, of_job: Problem | None) -> tuple[str, str] | None:
    """Return (reason, message) of what a pod waits for. ``of_job``: what is known of its Job."""
    if constants.KUEUE_ELASTIC_GATE in scheduling_gates(pod.raw):
        known = of_job if of_job is not None and of_job.reason in QUEUE_REASONS else None
        waits = "it waits for its quota, the others go on"
        return (known.reason, f"{waits}: {known.message}") if known else (c.QUOTA_PENDING, waits)
    if pod.waiting_reason == _GATED and not scheduling_gates(pod.raw):
        return None  # its last gate went a moment ago
    if pod.waiting_reason == c.UNSCHEDULABLE:
        about_volume = _VOLUME_WORDS.search(pod.waiting_message) is not None
        return (c.VOLUME_NOT_READY if about_volume else c.UNSCHEDULABLE), pod.waiting_message
    if pod.waiting_reason == c.IMAGE_PULL:
        return c.IMAGE_PULL, observation.pull_errors.get(pod.uid, pod.waiting_message)
    problem = observation.problems.get(pod.uid) if pod.phase == "Pending" else None
    if problem is not None and problem.reason == _SCHEDULER_EVENT and pod.scheduled:
        problem = None  # it waited for a node, and has one now
    if problem is not None and problem.reason in _VOLUME_EVENTS:
        return c.VOLUME_NOT_READY, f"{problem.reason}: {problem.message}"
    if pod.waiting_reason:
        return c.PODS_NOT_STARTING, f"{pod.waiting_reason}: {pod.waiting_message}"
    if problem is not None:
        return c.PODS_NOT_STARTING, f"{problem.reason}: {problem.message}"
    return None


def _silent_objects(job: DDPTrainingJob, children: Children) -> list[tuple[str, datetime]]:
    """Return UID, and since when it should have got on, of what waits without a reason in its status."""
    attempt = job.status.attempt
    attempt_job = children.job(attempt)
    began = waiting_since(job, attempt_job)
    if attempt_job is None or attempt_job.finished or attempt_job.deleting:
        return []
    if attempt_job.suspended:
        return [(attempt_job.uid, began)] if began is not None and waits_in_queue(job, attempt_job) else []
    pods = children.pods_of(attempt).newest
    found = []
    missing = len(pods) < min(
        job.status.attempt_nodes or attempt_job.nodes, attempt_job.nodes
    ) and not children.former_alive(attempt)
    if began is not None and missing:
        found.append((attempt_job.uid, began))
    elif gated := [pod.created for pod in pods.values() if scheduling_gates(pod.raw)]:
        found.append((attempt_job.uid, min(gated)))
    for pod in pods.values():
        silent = pod.scheduled or pod.ignored_since is not None
        if pod.alive and pod.phase == "Pending" and silent and not pod.waiting_reason:
            found.append((pod.uid, pod.created))
    return found
