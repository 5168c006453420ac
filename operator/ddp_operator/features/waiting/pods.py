"""Explain the condition Scheduled: what pods wait for, with the message of the responsible component. Pure.

The scheduler and the kubelet write into a pod's status, Kueue into the Job's Workload. The Job controller, when it may
not create a pod, and the kubelet, when it cannot mount a volume, only post Events. The operator reads Events and
Workloads of objects that do not start, and names the objects behind a pod's volumes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from ddp_operator.api import child_names, constants
from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time, scheduling_gates
from ddp_operator.api.status import QueueStatus
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import QUEUE_REASONS, Fact
from ddp_operator.decide.kueue import is_queued, is_resize_waiting, waits_in_queue
from ddp_operator.decide.scheduling import PATIENCE
from ddp_operator.decide.state import Observation, Problem
from ddp_operator.decide.views import JobView, PodView, list_sidecars, read_int
from ddp_operator.features.waiting.polling import waits_for_volume
from ddp_operator.features.waiting.reading import find_place
from ddp_operator.reading.containers import find_init_container
from ddp_operator.reading.events import SCHEDULER_EVENT

_GATED = "SchedulingGated"
_VOLUME_EVENTS = ("FailedMount", "FailedAttachVolume")
_NO_FREE_PORT = "have free ports"
_NODE_AFFINITY = "node affinity"
# The message of the scheduler of Kubernetes 1.36 on a pod whose gang cannot be scheduled.
_GANG_WAITS = "pod group is unschedulable, waiting for "


class _WaitingPod(NamedTuple):
    """What a pod waits for, with a reason of Scheduled."""

    name: str
    reason: str
    message: str


def explain_scheduling(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Scheduled of an attempt with what its pods wait for. ``fact``: by their number alone."""
    job = attempt.state.job
    if fact.reason != c.WAITING_FOR_FORMER_PODS:
        fact = _explain_pods(attempt, fact)
    edits = describe_late_edits(job, _find_job(attempt))
    reason = other_reasons.CHANGE_PENDING if edits and fact.status == "True" else fact.reason
    return replace(fact, reason=reason, message=fact.message + edits)


def _find_job(attempt: ObservedAttempt) -> JobView | None:
    return attempt.state.observation.job(attempt.recorded.attempt)


def _explain_pods(attempt: ObservedAttempt, fact: Fact) -> Fact:
    job = attempt.state.job
    observation = attempt.state.observation
    pods = attempt.pods.newest.values()
    attempt_job = _find_job(attempt)
    problem = observation.problems.get(attempt_job.uid) if attempt_job else None
    waiting = [explained for pod in pods if pod.alive and (explained := _explain_pod(job, pod, observation, problem))]
    if waiting:
        return _describe_waiting(waiting)

    if fact.status == "True":
        sidecars = _describe_sidecars(pods)
        return (
            replace(fact, reason=other_reasons.SIDECAR_RESTARTED, message=fact.message + sidecars) if sidecars else fact
        )
    blocked = _describe_blocked_job(attempt, attempt_job, problem) if attempt_job is not None else None
    return blocked or _describe_missing_pods(pods, attempt_job, fact, attempt.state.now)


def _describe_blocked_job(attempt: ObservedAttempt, attempt_job: JobView, problem: Problem | None) -> Fact | None:
    """Return why a Job has fewer pods than nodes: a queue, or a refusal of the API server; None: neither is known.

    ``problem``: of the Job.
    """
    job = attempt.state.job
    nodes = attempt.size.nodes
    scheduled = attempt.pods.scheduled
    if waits_in_queue(job, attempt_job):
        return _describe_queueing(attempt_job, problem, find_place(attempt.state.observation))
    partly_admitted = is_queued(job, attempt_job) and not attempt_job.takes_slices and not job.spares
    if partly_admitted and scheduled >= attempt_job.nodes:
        message = f"queue admitted {attempt_job.nodes}/{nodes} pods; training with {attempt_job.nodes}"
        return Fact(c.SCHEDULED, "False", c.QUOTA_PENDING, message)
    if problem is None or problem.reason in QUEUE_REASONS:
        return None
    # Each try has another pod name; without it, the same refusal is the same message.
    name = re.escape(attempt_job.name)
    message = re.sub(rf"{name}-[0-9]+-{child_names.POD_SUFFIX}", f"{attempt_job.name}-*", problem.message)
    return Fact(c.SCHEDULED, "False", c.PODS_FORBIDDEN, f"{message} ({scheduled}/{nodes} pods scheduled)")


def _describe_waiting(waiting: Sequence[_WaitingPod]) -> Fact:
    """Return Scheduled of pods that wait for a node, an image or a volume."""
    # Most pods of a gang report only that they wait for their peers; the scheduler's message on one pod has the reason.
    pod = min(waiting, key=lambda item: item.message.startswith(_GANG_WAITS))
    more = format_more_pods(len(waiting) - 1)
    return Fact(c.SCHEDULED, "False", pod.reason, f"{pod.name}{more}: {pod.message}")


def _describe_queueing(attempt_job: JobView, problem: Problem | None, queue: QueueStatus | None) -> Fact:
    """Return Scheduled of a Job that a queue has not admitted yet."""
    known = problem if problem is not None and problem.reason in QUEUE_REASONS else None
    if attempt_job.queue:
        waits = f"is waiting for admission by queue {attempt_job.queue}"
    elif known:
        waits = "is waiting for admission by Kueue"
    else:
        # Without the label, another client has suspended it, or Kueue if it manages all Jobs.
        waits = "was suspended by another client and waits to be resumed"
    because = f": {known.message}" if known else ""
    reason = known.reason if known else c.QUOTA_PENDING
    place = f"; {_describe_place(queue)}" if queue is not None and reason == c.QUOTA_PENDING else ""
    return Fact(c.SCHEDULED, "False", reason, f"Job {attempt_job.name} {waits}{because}{place}")


def _describe_place(queue: QueueStatus) -> str:
    """Return the place in a queue with its estimate."""
    place = f"position {queue.position}/{queue.of} in ClusterQueue {queue.cluster_queue}"
    if queue.waits_for:
        place += f", requested > free quota ({queue.waits_for})"
    if queue.start_p50 is None or queue.start_p90 is None:
        return place
    return f"{place}; expected start {format_time(queue.start_p50)}, with 90% by {format_time(queue.start_p90)}"


def _describe_sidecars(pods: Iterable[PodView]) -> str:
    """Return a note about the sidecar with the most restarts; training continues."""
    restarted = [
        (sidecar.restarts, pod.name, sidecar.name, sidecar.reason)
        for pod in pods
        if pod.alive
        for sidecar in list_restarted_sidecars(pod.raw)
    ]
    if not restarted:
        return ""
    count, pod_name, name, reason = max(restarted)
    return f"; sidecar {name} of pod {pod_name}: {count} restarts" + (f" (last reason: {reason})" if reason else "")


def _describe_missing_pods(pods: Iterable[PodView], attempt_job: JobView | None, fact: Fact, now: datetime) -> Fact:
    """Return Scheduled of an attempt whose pods are being created, with the controller that is late, if any."""

    def is_ignored(since: datetime | None) -> bool:
        return since is not None and now - since >= PATIENCE

    if attempt_job is not None and is_ignored(attempt_job.ignored_since):
        message = (
            f"the Job controller has not acted on Job {attempt_job.name}; check that kube-controller-manager is running"
        )
        return replace(fact, message=f"{message} ({fact.message})")
    ignored = [pod for pod in pods if is_ignored(pod.ignored_since)]
    if ignored:
        pod = ignored[0]
        more = format_more_pods(len(ignored) - 1)
        message = f"{pod.name}{more}: no scheduler has acted on it; check that {pod.scheduler} is running"
        return replace(fact, reason=c.UNSCHEDULABLE, message=f"{message} ({fact.message})")
    return fact


def _explain_pod(
    job: DDPTrainingJob, pod: PodView, observation: Observation, job_problem: Problem | None
) -> _WaitingPod | None:
    """Return what a pod waits for; None: unknown. ``job_problem``: the problem of its Job."""
    if constants.KUEUE_ELASTIC_GATE in scheduling_gates(pod.raw):
        return _explain_elastic_gate(pod, job_problem)
    if pod.waiting_reason == _GATED and not scheduling_gates(pod.raw):
        return None  # the last gate was just removed
    if pod.waiting_reason == c.UNSCHEDULABLE:
        return _explain_unschedulable(job, pod, observation.problems.get(pod.uid))
    if pod.waiting_reason == c.IMAGE_PULL:
        return _WaitingPod(pod.name, c.IMAGE_PULL, pod.waiting_message)

    problem = _find_pod_problem(pod, observation)
    if problem is not None and problem.reason in _VOLUME_EVENTS:
        return _WaitingPod(pod.name, c.VOLUME_NOT_READY, f"{problem.reason}: {problem.message}")
    if pod.waiting_reason:
        return _WaitingPod(pod.name, c.PODS_NOT_STARTING, f"{pod.waiting_reason}: {pod.waiting_message}")
    if problem is not None:
        return _WaitingPod(pod.name, c.PODS_NOT_STARTING, f"{problem.reason}: {problem.message}")
    return None


def _explain_unschedulable(job: DDPTrainingJob, pod: PodView, problem: Problem | None) -> _WaitingPod:
    """Return why no node fits a pod. ``problem``: of one of its claims."""
    message = pod.waiting_message
    if waits_for_volume(pod):
        because = f"; {problem.message}" if problem is not None and problem.reason == c.VOLUME_NOT_READY else ""
        return _WaitingPod(pod.name, c.VOLUME_NOT_READY, message + because)
    if _NO_FREE_PORT in message:
        message += f" ({_describe_host_ports(job)})"
    if _NODE_AFFINITY in message and pod.avoided_nodes:
        message = f"{message.rstrip('.')}; the operator avoids {', '.join(pod.avoided_nodes)} (status.failedNodes)"
    return _WaitingPod(pod.name, c.UNSCHEDULABLE, message)


def _describe_host_ports(job: DDPTrainingJob) -> str:
    """Return the ports of the node that a pod needs, each with the field that sets it."""
    pod = job.spec.template.spec or {}
    ports = []
    if pod.get("hostNetwork"):
        ports += [
            f"{job.spec.rendezvous.port} of spec.rendezvous.port",
            f"{job.spec.metrics.port} of spec.metrics.port",
        ]
    for container in pod.get("containers") or ():
        for port in container.get("ports") or ():
            number = port.get("containerPort") if pod.get("hostNetwork") else port.get("hostPort")
            ports += [f"{number} of container {container['name']}"] if number else []
    return f"ports of the node: {', '.join(ports)}"


def _explain_elastic_gate(pod: PodView, job_problem: Problem | None) -> _WaitingPod:
    message = "waiting for quota; its peers continue"
    if job_problem is None or job_problem.reason not in QUEUE_REASONS:
        return _WaitingPod(pod.name, c.QUOTA_PENDING, message)
    return _WaitingPod(pod.name, job_problem.reason, f"{message}: {job_problem.message}")


def _find_pod_problem(pod: PodView, observation: Observation) -> Problem | None:
    """Return the latest warning about a pod that has not started."""
    waits_for_kubelet = pod.phase == "Pending" and find_init_container(pod) is None
    problem = observation.problems.get(pod.uid) if waits_for_kubelet else None
    if problem is not None and problem.reason == SCHEDULER_EVENT and pod.scheduled:
        return None  # it waited for a node, and has one now
    return problem


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


class RestartedSidecar(NamedTuple):
    """A native sidecar that was restarted. ``reason``: of its last end."""

    name: str
    restarts: int
    reason: str


def list_restarted_sidecars(raw: Mapping[str, Any]) -> tuple[RestartedSidecar, ...]:
    """Return the native sidecars of a pod that were restarted."""
    sidecars = list_sidecars(raw)
    restarted = []
    for container in (raw.get("status") or {}).get("initContainerStatuses") or ():
        restarts = read_int(container.get("restartCount"))
        if restarts > 0 and container.get("name") in sidecars:
            ended = (container.get("lastState") or {}).get("terminated") or {}
            restarted.append(RestartedSidecar(container["name"], restarts, str(ended.get("reason") or "")))
    return tuple(restarted)
