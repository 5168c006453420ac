"""Queues and deadlines: whether a queue controls a Job, and how long its pods may wait and run. Pure.

The operator may delete a Job that a queue suspends and resumes. It changes only fields for which Kueue stops no pod.
"""

from datetime import datetime, timedelta

from ddp_operator.api.constants import KUEUE_QUEUE_LABEL, MAX_ANNOTATION
from ddp_operator.api.job import DDPTrainingJob, kueue_metadata
from ddp_operator.decide import conditions as c
from ddp_operator.decide.observation import Pods
from ddp_operator.decide.views import JobView


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


def is_resuming(job: DDPTrainingJob) -> bool:
    """Return whether this is the first pass after a suspension."""
    return not job.spec.suspend and job.status.is_true(c.SUSPENDED)


def compute_active_deadline(job: DDPTrainingJob, attempt_job: JobView | None, now: datetime) -> datetime | None:
    """Return the end of the active time; None: there is no limit, or the time does not run.

    The time runs from the start of the job or its latest resumption, in a queue from the latest admission.
    """
    seconds = job.spec.active_deadline_seconds
    start = now if is_resuming(job) else job.status.start_time
    if is_queued(job, attempt_job):
        start = attempt_job.started if attempt_job is not None else None
    return None if start is None or seconds is None else start + timedelta(seconds=seconds)


def find_waiting_start(job: DDPTrainingJob, attempt_job: JobView | None) -> datetime | None:
    """Return when pods could first exist: the attempt's start, or the last change of its Job's suspension."""
    began = job.status.attempt_time or job.status.start_time
    changed = attempt_job.suspend_changed if attempt_job is not None else None
    return max(filter(None, (began, changed)), default=None)


def compute_pending_deadline(
    job: DDPTrainingJob, attempt_job: JobView | None, pods: Pods, now: datetime
) -> datetime | None:
    """Return when all pods must run; None: there is no limit, or they have run."""
    seconds = job.spec.pending_deadline_seconds
    since = now if is_resuming(job) else find_waiting_start(job, attempt_job)
    if since is None or seconds is None or job.status.is_true(c.RENDEZVOUSED):
        return None
    if len({pod.index for pod in pods if pod.has_run}) >= job.status.attempt_nodes:
        return None
    return since + timedelta(seconds=seconds)
