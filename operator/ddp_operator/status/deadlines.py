"""Until when a job may run, and until when an attempt may wait to run."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.status import conditions as c
from ddp_operator.status.observation import PodView
from ddp_operator.status.termination import parse_time


def resumes(job: DDPTrainingJob) -> bool:
    """Tell whether this is the first pass after a suspension."""
    return not job.spec.suspend and c.is_true(job.status.conditions, c.SUSPENDED)


def active(job: DDPTrainingJob, now: datetime) -> datetime | None:
    """Return the end of the active time, which counts from the latest resumption."""
    start, seconds = parse_time(job.status.start_time), job.spec.active_deadline_seconds
    if resumes(job):
        start = now
    return None if start is None or seconds is None else start + timedelta(seconds=seconds)


def pending(job: DDPTrainingJob, pods: tuple[PodView, ...], now: datetime) -> datetime | None:
    """Return the end of the time in which all pods must run; None once they have, in this attempt."""
    since, seconds = parse_time(job.status.attempt_time or job.status.start_time), job.spec.pending_deadline_seconds
    if since is None or seconds is None or c.is_true(job.status.conditions, c.RENDEZVOUSED):
        return None
    if len({pod.index for pod in pods if pod.has_run}) >= job.status.attempt_nodes:
        return None
    return (now if resumes(job) else since) + timedelta(seconds=seconds)
