"""Queues: whether one controls a Job, and what it permits. Features read why it admits none. Pure.

The operator may delete a Job that a queue suspends and resumes. It changes only fields for which Kueue stops no pod.
"""

from datetime import datetime
from typing import Any

from ddp_operator.api.constants import KUEUE_QUEUE_LABEL, MAX_ANNOTATION
from ddp_operator.api.job import DDPTrainingJob, kueue_metadata
from ddp_operator.decide import conditions as c
from ddp_operator.decide.views import JobView

_MAX_LENGTH = 1024


def line(text: Any) -> str:
    """Return a message of another component in one line of limited length."""
    return " ".join(str(text or "").split())[:_MAX_LENGTH]


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
