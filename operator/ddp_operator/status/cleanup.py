"""A job that has ended: its pods by spec.cleanPodPolicy, its resource by its time to live."""

from datetime import datetime, timedelta

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.status.decision import Action, Decision, DeleteJob, DeleteResource, SuspendJob
from ddp_operator.status.diagnosis import will_fail_job
from ddp_operator.status.lost_nodes import fail_lost_pods
from ddp_operator.status.observation import Observation
from ddp_operator.status.queueing import is_queued
from ddp_operator.status.views import JobView

# While something is awaited that sends an event, in case that is lost: the end of pods, of a Job.
LATER = 10.0
# The Job controller needs about a second to fail a Job by its podFailurePolicy.
_FAIL_JOB_PATIENCE = timedelta(seconds=60)


def clean_up(job: DDPTrainingJob, observation: Observation, now: datetime) -> Decision:
    """Clean up; later, delete the resource. The status stays as it is."""
    actions: list[Action] = []
    waits: list[float] = []
    for view in observation.jobs:
        actions += _clean(view, job, observation, now, waits)
    actions += fail_lost_pods(job, observation, now, waits)
    ttl, ended = job.spec.ttl_seconds_after_finished, job.status.completion_time
    if ttl is not None and ended is not None:
        left = (ended + timedelta(seconds=ttl) - now).total_seconds()
        if left <= 0:
            actions.append(DeleteResource())
        else:
            waits.append(left)
    return Decision(job.status, tuple(actions), min(waits, default=None))


def is_about_to_fail(view: JobView, job: DDPTrainingJob, observation: Observation, now: datetime) -> bool:
    """Tell whether the Job controller is about to end a Job whose failure is in the ledger."""
    failure = job.status.last_failure
    seen = failure.time if failure and failure.attempt == view.attempt else None
    patient = seen is not None and now - seen < _FAIL_JOB_PATIENCE
    return patient and will_fail_job(observation.pods_of(view.attempt))


def _clean(
    view: JobView, job: DDPTrainingJob, observation: Observation, now: datetime, waits: list[float]
) -> list[Action]:
    policy = job.spec.clean_pod_policy
    if view.deleting:
        return []
    if view.attempt < job.status.attempt and not view.finished and not is_about_to_fail(view, job, observation, now):
        # Made by an operator that was deposed before and heard late: nobody has asked for its pods.
        return [DeleteJob(view.name, view.uid)]
    if policy == "None":
        return []
    if policy == "All":
        return [DeleteJob(view.name, view.uid)]
    if view.finished:
        return []
    if is_about_to_fail(view, job, observation, now):
        waits.append(LATER)
        return []
    if is_queued(job, view):
        return [DeleteJob(view.name, view.uid)]  # suspended, it would be admitted once more
    # A suspended Job ends the pods that run and leaves the others, with their logs.
    return [] if view.suspended else [SuspendJob(view.name, True)]
