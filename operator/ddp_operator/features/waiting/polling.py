"""Which objects of a job wait without a reason in their status, and when Events and Workloads are read for them. Pure.

All waiting jobs share a limited number of reads per second.
"""

import re
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import scheduling_gates
from ddp_operator.decide import conditions as c
from ddp_operator.decide.kueue import find_waiting_start, waits_in_queue
from ddp_operator.decide.state import Children
from ddp_operator.decide.views import PodView
from ddp_operator.reading.containers import find_init_container

# A Job's pods are created within a second; a kubelet starts a container or reports a problem within a few seconds.
_PATIENCE: Final = timedelta(seconds=5)
_MIN_DELAY: Final = 10.0
_MAX_DELAY: Final = 300.0
# A queue may be stopped, or a Workload deactivated, at any time, without a change of the Job.
_MAX_DELAY_IN_QUEUE: Final = 60.0
_READS_PER_SECOND: Final = 5.0
_MAX_INSPECTED: Final = 3
_VOLUME_WORDS: Final = re.compile(r"volume", re.IGNORECASE)


class _SilentObject(NamedTuple):
    """A Job or pod that should have started ``since`` and has no reason in its status."""

    uid: str
    since: datetime


def list_objects_to_inspect(job: DDPTrainingJob, children: Children, now: datetime) -> tuple[str, ...]:
    """Return the UIDs of the Job and pods whose status has no reason, so that their Events are read."""
    silent = [item.uid for item in _list_silent_objects(job, children) if now - item.since >= _PATIENCE]
    return tuple(silent[:_MAX_INSPECTED])


def compute_event_poll_delay(job: DDPTrainingJob, children: Children, now: datetime, waiting_jobs: int) -> float | None:
    """Return the seconds until Events of objects without a reason are read; None: all objects have one.

    All waiting jobs share a limited number of reads per second.
    """
    silent = _list_silent_objects(job, children)
    if not silent:
        return None
    waited = now - min(item.since for item in silent)
    if waited < _PATIENCE:
        return max(1.0, (_PATIENCE - waited).total_seconds())
    longest = _MAX_DELAY_IN_QUEUE if waits_in_queue(job, children.job(job.status.attempt)) else _MAX_DELAY
    delay = max(_MIN_DELAY, waited.total_seconds() / 2)
    return max(min(longest, delay), waiting_jobs / _READS_PER_SECOND)


def _list_silent_objects(job: DDPTrainingJob, children: Children) -> list[_SilentObject]:
    """Return the objects that wait without a reason in their status."""
    attempt = job.status.attempt
    attempt_job = children.job(attempt)
    began = find_waiting_start(job, attempt_job)
    if attempt_job is None or attempt_job.finished or attempt_job.deleting:
        return []
    if attempt_job.suspended:
        waits = began is not None and waits_in_queue(job, attempt_job)
        return [_SilentObject(attempt_job.uid, began)] if began is not None and waits else []

    silent = []
    pods = children.pods_of(attempt).newest
    expected = min(job.status.attempt_nodes or attempt_job.nodes, attempt_job.nodes)
    missing = len(pods) < expected and not children.former_alive(attempt)
    gated = [pod.created for pod in pods.values() if scheduling_gates(pod.raw)]
    if began is not None and missing:
        silent.append(_SilentObject(attempt_job.uid, began))
    elif gated:
        silent.append(_SilentObject(attempt_job.uid, min(gated)))
    silent += [_SilentObject(pod.uid, pod.created) for pod in pods.values() if _is_silent(pod)]
    return silent


def _is_silent(pod: PodView) -> bool:
    if waits_for_volume(pod):
        return True  # the Events about its claims have the reason
    if not pod.alive or pod.phase != "Pending" or pod.waiting_reason or find_init_container(pod) is not None:
        return False
    return pod.scheduled or pod.ignored_since is not None


def waits_for_volume(pod: PodView) -> bool:
    """Return whether the scheduler finds no node because of a volume."""
    return pod.waiting_reason == c.UNSCHEDULABLE and _VOLUME_WORDS.search(pod.waiting_message) is not None
