"""Compute the condition Scheduled by the number of pods. Features know what the pods wait for. Pure."""

from datetime import datetime, timedelta
from typing import Final

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.kueue import waits_in_queue
from ddp_operator.decide.state import Observation

PATIENCE: Final = timedelta(seconds=30)
"""Time after which a controller has not noticed an object: it handles one within a second, thousands within some."""


def describe_scheduling(job: DDPTrainingJob, observation: Observation, attempt: int, nodes: int, now: datetime) -> Fact:
    """Return Scheduled of an attempt with a desired number of nodes."""
    if observation.former_alive(attempt):
        return _describe_former_pods(job, observation, attempt, now)
    scheduled = observation.pods_of(attempt).scheduled
    if scheduled >= nodes:
        return Fact(c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED, f"{nodes}/{nodes} pods scheduled")
    is_waiting = waits_in_queue(job, observation.job(attempt))
    reason = c.QUOTA_PENDING if is_waiting else c.WAITING_FOR_PODS
    return Fact(c.SCHEDULED, "False", reason, f"{scheduled}/{nodes} pods scheduled")


def _describe_former_pods(job: DDPTrainingJob, observation: Observation, attempt: int, now: datetime) -> Fact:
    former = "" if job.spec.suspend else " of the previous attempt"
    message = f"waiting for {observation.former_alive(attempt)} pods{former} to terminate"
    since = observation.orphaned_since
    if since is not None and now - since >= PATIENCE:
        message += (
            "; their Job does not exist and no controller deletes them: check that kube-controller-manager is running"
        )
    return Fact(c.SCHEDULED, "False", c.WAITING_FOR_FORMER_PODS, message)
