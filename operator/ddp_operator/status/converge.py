"""The children follow the ledger: what is created, deleted, suspended or resized, and when to look again. Pure.

Also once the job has ended: its pods go by spec.cleanPodPolicy, its resource by its time to live.
"""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Status
from ddp_operator.kubeobjects import truncate
from ddp_operator.status import attempts, lost_nodes
from ddp_operator.status import conditions as c
from ddp_operator.status.decision import (
    Action,
    CreatePod,
    Decision,
    DeleteJob,
    DeleteResource,
    EnsureChildren,
    RelabelJob,
    ResizeJob,
    SuspendJob,
    SuspendResource,
)
from ddp_operator.status.describe import describe
from ddp_operator.status.node_health import LOOK_SECONDS, nodes_in_use
from ddp_operator.status.observation import Observation, Pods, State
from ddp_operator.status.replacement import create_missing_pods
from ddp_operator.status.scheduling import event_poll_delay
from ddp_operator.status.usage import idle_left, suspends
from ddp_operator.status.views import JobView
from ddp_operator.status.waiting import active_deadline, edited_for_queue, is_queued, pending_deadline, resumes

SOON = 1.0
"""Seconds to wait for what sends no event: a page, a report."""
RECHECK_REFUSAL = 30.0
NODE_PATIENCE = timedelta(seconds=60)
"""How long the nodes that failed are avoided although no other can take a pod; an autoscaler may bring one."""
_FIRST_STEP = timedelta(minutes=2)
# How long pods that have trained together may end one after another.
_LATE_COMERS = timedelta(seconds=30)
# While something is awaited that sends an event, in case that is lost: the end of pods, of a Job.
LATER = 10.0
# The Job controller needs about a second to fail a Job by its podFailurePolicy.
_FAIL_JOB_PATIENCE = timedelta(seconds=60)


def converge(state: State, progress_interval: float) -> Decision:
    """Make the children follow the ledger, and describe what is."""
    job, observation, now, refusal = state.job, state.observation, state.now, state.refusal
    attempt, attempt_job, pods = state.status.attempt, state.attempt_job, state.pods
    actions: list[Action] = [DeleteJob(view.name, view.uid) for view in observation.jobs if _is_obsolete(state, view)]
    waits: list[float] = []
    if attempt_job is None:
        if _former_may_run(state):
            waits.append(LATER)
        elif refusal is not None:
            waits.append(RECHECK_REFUSAL)
        elif (left := _held_back(state)) > 0:
            waits.append(left)
        elif not job.spec.suspend:
            actions.append(EnsureChildren(attempt, job.status.attempt_nodes))
            waits.append(LATER)  # a Job that gets no pods sends no event
    elif attempt_job.deleting:
        waits.append(LATER)  # somebody deletes it: it is made anew once it and its pods are gone
    elif observation.launcher_lost and not any(pod.alive and pod.has_run for pod in pods):
        actions.append(DeleteJob(attempt_job.name, attempt_job.uid))  # made anew with this operator's launcher
        waits.append(LATER)
    elif refusal is None and _was_edited(state, attempt_job):
        actions.append(DeleteJob(attempt_job.name, attempt_job.uid))  # made anew from the spec as it is now
        waits.append(LATER)
    else:
        actions += _suspend_actions(state, attempt_job)
        waits += [SOON for action in actions if isinstance(action, RelabelJob)]
        if attempt_job.nodes != job.status.attempt_nodes and can_resize(state, attempt_job):
            actions.append(ResizeJob(attempt_job.name, job.status.attempt_nodes))
        actions += create_missing_pods(state, attempt_job)
        if not observation.shared_complete and not attempt_job.finished and refusal is None:
            actions.append(EnsureChildren(attempt, job.status.attempt_nodes))
    resumed = {"start_time": truncate(now), "attempt_time": truncate(now)} if resumes(job) else {}
    described = describe(state, replace(state.status, **resumed))
    if described.phase == "Running" or (described.phase == "Restarting" and pods):
        waits.append(scrape_interval(described, now, progress_interval))
    for deadline in (active_deadline(job, attempt_job, now), pending_deadline(job, attempt_job, pods, now)):
        if deadline is not None and not job.spec.suspend:
            waits.append(max(0.1, (deadline - now).total_seconds()))
    if nodes_in_use(job, observation):
        waits.append(LOOK_SECONDS)
    idle = idle_left(state)
    if suspends(state):
        if state.status.is_true(c.IDLE):
            actions.append(SuspendResource())
        else:
            waits.append(0.0)  # why it is suspended is written first
    elif idle is not None and idle > 0:
        waits.append(idle)
    over = find_late_joiner_deadline(state)
    if over is not None:
        waits.append(max(0.1, (over - now).total_seconds()))
    blocked = blocked_by_avoidance(pods)
    if blocked is not None:
        waits.append(max(SOON, (blocked[0] + NODE_PATIENCE - now).total_seconds()))
    question = event_poll_delay(job, observation, now, observation.polling_jobs)
    if question is not None and not job.spec.suspend:
        waits.append(question)
    actions += lost_nodes.fail_lost_pods(job, observation, now, waits)
    # What a queue has taken back in the meantime must not start: a watch may be late to say so.
    fresh = any(isinstance(action, CreatePod) for action in actions)
    return Decision(described, tuple(actions), min(waits, default=None), needs_fresh_read=fresh)


def scrape_interval(status: Status, now: datetime, progress_interval: float) -> float:
    """Return how often pod 0's page is read, in seconds: often until the first step, at most two minutes long."""
    if status.attempt == 0:  # that of the pod that fetches the inputs
        return progress_interval
    joined = status.condition(c.RENDEZVOUSED)
    if joined is None or joined.status == "False":
        return min(SOON, progress_interval)
    since = joined.last_transition_time
    waiting = not status.is_true(c.PROGRESSING) and since is not None and now - since < _FIRST_STEP
    return min(SOON, progress_interval) if waiting else progress_interval


def can_resize(state: State, attempt_job: JobView) -> bool:
    """Tell whether the Job of an elastic job can be given another size.

    Of what runs in a queue only an elastic Job of Kueue's can, as any other is stopped for it, and a gang never.
    """
    stops = is_queued(state.job, attempt_job) and not (attempt_job.suspended or attempt_job.takes_slices)
    fixed = state.spec.elastic is None or stops or any(pod.ganged for pod in state.pods)
    return not fixed and not attempt_job.finished and not attempt_job.deleting


def find_late_joiner_deadline(state: State) -> datetime | None:
    """Return when an elastic job has succeeded although some of its pods still run; None: it has to wait for them.

    Pods that train together end together, pod 0 among them. One that runs on came when training was over, and would
    wait for pod 0 until rendezvous.joinTimeoutSeconds.
    """
    newest = state.pods.newest
    zero = newest.get(0)
    if state.spec.elastic is None or zero is None or zero.phase != "Succeeded" or zero.termination is None:
        return None
    if zero.termination.time is None or any(pod.phase == "Failed" for pod in newest.values()):
        return None
    return datetime.fromtimestamp(zero.termination.time, UTC) + _LATE_COMERS


def blocked_by_avoidance(pods: Pods) -> tuple[datetime, str] | None:
    """Return since when, and with which message, the scheduler finds no node but those that are avoided."""
    found = [
        (pod.unscheduled_since, f"{pod.name}: {pod.waiting_message}")
        for pod in pods
        if pod.phase == "Pending"
        and pod.unscheduled_since
        and pod.waiting_reason == c.UNSCHEDULABLE
        and "node affinity" in pod.waiting_message
        and pod.avoids_nodes
    ]
    return min(found, default=None)


def _held_back(state: State) -> float:
    """Return in how many seconds the current attempt may get its pods."""
    began = state.status.attempt_time
    return (began + attempts.start_delay(state.status) - state.now).total_seconds() if began else 0.0


def _was_edited(state: State, attempt_job: JobView) -> bool:
    """Tell whether a Job was built from another spec, which could be edited because no pod has run."""
    has_run = state.status.first_run_time is not None or any(pod.has_run for pod in state.observation.pods)
    return not has_run and not attempt_job.finished and attempt_job.spec_digest not in ("", state.job.spec_digest)


def _former_may_run(state: State) -> bool:
    """Tell whether a pod of another attempt runs, or may still be made by a Job that has not finished."""
    attempt = state.status.attempt
    unfinished = any(view.attempt != attempt and not view.finished for view in state.observation.jobs)
    return unfinished or state.observation.former_alive(attempt) > 0


def _is_obsolete(state: State, former: JobView) -> bool:
    """Tell whether a former attempt's Job has to go.

    The last failed one stays, for its pods' logs; also while its end is certain but the Job controller has not said so
    yet. One that would run on (a resize, an OOM kill) and older ones are deleted.
    """
    age = state.status.attempt - former.attempt
    if age < 1 or former.deleting:
        return False
    if age > 1:
        return True
    return not former.failed and not is_about_to_fail(former, state.job, state.observation, state.now)


def _suspend_actions(state: State, attempt_job: JobView) -> list[Action]:
    if attempt_job.finished:
        return []
    if is_queued(state.job, attempt_job):
        # Its queue alone changes `suspend`: it would start again what somebody else has stopped, and what somebody else
        # starts has no quota.
        if state.spec.suspend:
            return [DeleteJob(attempt_job.name, attempt_job.uid)]
        edited = edited_for_queue(state.job, attempt_job) if attempt_job.suspended else {}
        return [RelabelJob(attempt_job.name, edited)] if edited else []
    if attempt_job.suspended != state.spec.suspend:
        return [SuspendJob(attempt_job.name, state.spec.suspend)]
    return []


def clean_up(job: DDPTrainingJob, observation: Observation, now: datetime) -> Decision:
    """Clean up; later, delete the resource. The status stays as it is."""
    actions: list[Action] = []
    waits: list[float] = []
    for view in observation.jobs:
        actions += _clean(view, job, observation, now, waits)
    actions += lost_nodes.fail_lost_pods(job, observation, now, waits)
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
    return patient and any(pod.fails_job for pod in observation.pods_of(view.attempt))


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
