"""Until when a job may run, and until when an attempt may wait to run."""

from datetime import datetime, timedelta

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.status import conditions as c
from ddp_operator.status.observation import Pods
from ddp_operator.status.queueing import is_queued
from ddp_operator.status.views import JobView


def resumes(job: DDPTrainingJob) -> bool:
    """Tell whether this is the first pass after a suspension."""
    return not job.spec.suspend and job.status.is_true(c.SUSPENDED)


def active(job: DDPTrainingJob, attempt_job: JobView | None, now: datetime) -> datetime | None:
    """Return the end of the active time; None while it does not run.

    It counts from the start of the job or its latest resumption; in a queue, as that of a Job itself, from the latest
    admission.
    """
    start, seconds = job.status.start_time, job.spec.active_deadline_seconds
    if resumes(job):
        start = now
    if is_queued(job, attempt_job):
        start = attempt_job.started if attempt_job is not None else None
    return None if start is None or seconds is None else start + timedelta(seconds=seconds)


def waiting_since(job: DDPTrainingJob, attempt_job: JobView | None) -> datetime | None:
    """Return since when pods are wanted, or may be made: the attempt's start, or since a queue took or admitted it."""
    began = job.status.attempt_time or job.status.start_time
    changed = attempt_job.suspend_changed if attempt_job is not None else None
    return max(filter(None, (began, changed)), default=None)


def pending(job: DDPTrainingJob, attempt_job: JobView | None, pods: Pods, now: datetime) -> datetime | None:
    """Return the end of the time in which all pods must run; None once they have, since they were last wanted."""
    since, seconds = now if resumes(job) else waiting_since(job, attempt_job), job.spec.pending_deadline_seconds
    if since is None or seconds is None or job.status.is_true(c.RENDEZVOUSED):
        return None
    if len({pod.index for pod in pods if pod.has_run}) >= job.status.attempt_nodes:
        return None
    return since + timedelta(seconds=seconds)
