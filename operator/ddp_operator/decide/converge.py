"""Reconcile child objects with the recorded attempt: create, delete, suspend, resize; when the next pass is due. Pure.

Once the job has ended, spec.cleanPodPolicy decides about its pods, and its time to live about the resource.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempts import compute_start_delay
from ddp_operator.decide.conditions import set_conditions
from ddp_operator.decide.describe import describe
from ddp_operator.decide.kueue import find_queue_edits, find_waiting_start, is_queued
from ddp_operator.decide.losses import (
    LOOK_SECONDS,
    create_missing_pods,
    evict_leaving_pods,
    fail_lost_pods,
    list_nodes_in_use,
)
from ddp_operator.decide.state import (
    Action,
    CreatePod,
    Decision,
    DeleteJob,
    DeleteResource,
    EnsureChildren,
    RelabelJob,
    ResizeJob,
    State,
    SuspendJob,
)
from ddp_operator.decide.views import JobView, Pods, PodView

SOON = 1.0
"""Seconds to wait for a change that sends no event: of a page, a report."""
RECHECK_REFUSAL = 30.0
NODE_PATIENCE = timedelta(seconds=60)
"""How long failed nodes are avoided if no other node fits; an autoscaler may add one."""
_FIRST_STEP = timedelta(minutes=2)
# Pods that have trained together end within this time of each other.
_LATE_JOINERS = timedelta(seconds=30)
LONGEST_HOLD = timedelta(hours=1)
"""How long after a job's end features may keep its resource from deletion."""
# Seconds until the next pass if the event that it waits for (the end of pods or of a Job) is lost.
LATER = 10.0
# The Job controller needs about a second to fail a Job by its podFailurePolicy.
_FAIL_JOB_PATIENCE = timedelta(seconds=60)


@dataclass
class _PassPlan:
    """The actions of a pass, and the seconds until further passes are due."""

    actions: list[Action] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def wait_until(self, moment: datetime, now: datetime, *, least: float = 0.1) -> None:
        """Plan a pass at a time, at the earliest in ``least`` seconds."""
        self.waits.append(max(least, (moment - now).total_seconds()))


def converge(state: State, progress_interval: float) -> Decision:
    """Reconcile child objects with the recorded attempt and update the status."""
    plan = _PassPlan()
    plan.actions += [DeleteJob(job.name, job.uid) for job in state.observation.jobs if _is_obsolete(state, job)]
    _reconcile_job(state, plan)
    described = _describe_progress(state, progress_interval, plan)
    _check_deadlines(state, plan)
    _watch_nodes(state, plan)
    _follow_remarks(state, plan)
    plan.actions += fail_lost_pods(state, plan.waits)
    _ensure_shared_children(state, plan)  # last, because a refusal ends the actions of a pass

    # A watch may report late that the queue has suspended the Job, which must not get a pod then.
    creates_pod = any(isinstance(action, CreatePod) for action in plan.actions)
    next_pass = min(plan.waits, default=None)
    return Decision(described, tuple(plan.actions), next_pass, needs_fresh_read=creates_pod)


def _reconcile_job(state: State, plan: _PassPlan) -> None:
    """Create, replace or update the Job of the current attempt."""
    job = state.attempt_job
    if job is None:
        _create_job(state, plan)
    elif job.deleting:
        plan.waits.append(LATER)  # a client deletes it: it is created again once it and its pods are deleted
    elif _needs_new_job(state, job):
        plan.actions.append(DeleteJob(job.name, job.uid))
        plan.waits.append(LATER)
    else:
        _update_job(state, job, plan)


def _create_job(state: State, plan: _PassPlan) -> None:
    if _former_may_run(state):
        plan.waits.append(LATER)
        return
    if state.refusal is not None:
        plan.waits.append(RECHECK_REFUSAL)
        return
    delay = _compute_start_delay(state)
    if delay > 0:
        plan.waits.append(delay)
    elif not state.spec.suspend:
        plan.actions.append(EnsureChildren(state.status.attempt, state.status.attempt_nodes))
        plan.waits.append(LATER)  # a Job that gets no pods sends no event


def _needs_new_job(state: State, job: JobView) -> bool:
    """Return whether the Job must be recreated, with this operator's launcher or from the edited spec."""
    if state.observation.launcher_lost and not any(pod.alive and pod.has_run for pod in state.pods):
        return True
    return state.refusal is None and _was_edited(state, job)


def _update_job(state: State, job: JobView, plan: _PassPlan) -> None:
    suspending = _suspend_actions(state, job)
    plan.actions += suspending
    plan.waits += [SOON for action in suspending if isinstance(action, RelabelJob)]
    nodes = state.status.attempt_nodes
    if job.nodes != nodes and can_resize(state, job):
        plan.actions.append(ResizeJob(job.name, nodes))
    plan.actions += create_missing_pods(state, job)
    plan.actions += evict_leaving_pods(state)


def _ensure_shared_children(state: State, plan: _PassPlan) -> None:
    """Create what the pods of the existing Job need, if it was deleted."""
    job = state.attempt_job
    if job is None or job.deleting or job.finished or state.refusal is not None or _needs_new_job(state, job):
        return
    if not state.observation.shared_complete:
        plan.actions.append(EnsureChildren(state.status.attempt, state.status.attempt_nodes))


def _describe_progress(state: State, progress_interval: float, plan: _PassPlan) -> Status:
    """Return the status of the pass, and plan when pod 0's page is read again."""
    status = state.status
    if is_resuming(state.job):
        status = replace(status, start_time=truncate(state.now), attempt_time=truncate(state.now))
    described = describe(state, status)
    if described.phase in ("Running", "Held") or (described.phase == "Restarting" and state.pods):
        plan.waits.append(compute_scrape_interval(described, state.now, progress_interval))
    return described


def _check_deadlines(state: State, plan: _PassPlan) -> None:
    if not state.spec.suspend:
        active = compute_active_deadline(state.job, state.attempt_job, state.now)
        pending = compute_pending_deadline(state.job, state.attempt_job, state.pods, state.now)
        for deadline in (active, pending):
            if deadline is not None:
                plan.wait_until(deadline, state.now)
    late_joiners = find_late_joiner_deadline(state)
    if late_joiners is not None:
        plan.wait_until(late_joiners, state.now)


def _watch_nodes(state: State, plan: _PassPlan) -> None:
    if state.observation.troubles is not None and list_nodes_in_use(state.job, state.observation):
        plan.waits.append(LOOK_SECONDS)
    blocked = find_avoidance_block(state.pods)
    if blocked is not None:
        plan.wait_until(blocked.since + NODE_PATIENCE, state.now, least=SOON)


def _follow_remarks(state: State, plan: _PassPlan) -> None:
    for remark in state.remarks:
        plan.actions += remark.actions
        if remark.wait is not None:
            plan.waits.append(remark.wait)


def compute_scrape_interval(status: Status, now: datetime, progress_interval: float) -> float:
    """Return the seconds between two reads of pod 0's page: few until the first step, for at most two minutes."""
    if status.attempt == 0:  # the page of the pod that fetches the inputs
        return progress_interval
    joined = status.condition(c.RENDEZVOUSED)
    if joined is None or joined.status == "False" or _may_change_run(status, now):
        return min(SOON, progress_interval)
    since = joined.last_transition_time
    waiting = not status.is_true(c.PROGRESSING) and since is not None and now - since < _FIRST_STEP
    return min(SOON, progress_interval) if waiting else progress_interval


def _may_change_run(status: Status, now: datetime) -> bool:
    """Return whether a run of `ddp dev` has started or ended lately: the next one may be as short as that."""
    dev = status.dev
    if dev is None:
        return False
    return dev.release_time is not None or (dev.start_time is not None and now - dev.start_time < _FIRST_STEP)


def can_resize(state: State, attempt_job: JobView) -> bool:
    """Return whether the Job of an elastic job can be resized while its pods run.

    In a queue only an elastic Job of Kueue can be resized, because Kueue would stop any other Job. A gang cannot.
    """
    if state.spec.elastic is None or attempt_job.finished or attempt_job.deleting:
        return False
    if attempt_job.ganged or any(pod.ganged for pod in state.pods):
        return False
    return not is_queued(state.job, attempt_job) or attempt_job.suspended or attempt_job.takes_slices


def find_late_joiner_deadline(state: State) -> datetime | None:
    """Return when an elastic job counts as succeeded although some pods still run; None: it waits for them.

    Pods that train together end together with pod 0. A pod that still runs joined after the end of training, and would
    wait for pod 0 until rendezvous.joinTimeoutSeconds.
    """
    newest = state.pods.newest
    zero = newest.get(0)
    if state.spec.elastic is None or zero is None or zero.phase != "Succeeded" or zero.termination is None:
        return None
    if zero.termination.time is None or any(pod.phase == "Failed" for pod in newest.values()):
        return None
    return datetime.fromtimestamp(zero.termination.time, UTC) + _LATE_JOINERS


class AvoidanceBlock(NamedTuple):
    """A pod that fits only on nodes that the operator avoids."""

    since: datetime
    message: str


def find_avoidance_block(pods: Pods) -> AvoidanceBlock | None:
    """Return the first pod that fits only on avoided nodes, with the scheduler's message; None: no pod does."""
    blocks = [
        AvoidanceBlock(pod.unscheduled_since, f"{pod.name}: {pod.waiting_message}")
        for pod in pods
        if pod.unscheduled_since and _is_blocked_by_avoidance(pod)
    ]
    return min(blocks, default=None)


def _is_blocked_by_avoidance(pod: PodView) -> bool:
    unschedulable = pod.phase == "Pending" and pod.waiting_reason == c.UNSCHEDULABLE
    return unschedulable and "node affinity" in pod.waiting_message and bool(pod.avoided_nodes)


def _compute_start_delay(state: State) -> float:
    """Return the seconds until the current attempt may get its pods."""
    began = state.status.attempt_time
    if began is None:
        return 0.0
    return (began + compute_start_delay(state.status) - state.now).total_seconds()


def _was_edited(state: State, attempt_job: JobView) -> bool:
    """Return whether the spec was edited after the Job was built, which is allowed until a pod has run."""
    has_run = state.status.first_run_time is not None or any(pod.has_run for pod in state.observation.pods)
    return not has_run and not attempt_job.finished and attempt_job.spec_digest not in ("", state.job.spec_digest)


def _former_may_run(state: State) -> bool:
    """Return whether a pod of another attempt runs, or a Job that has not finished may still create one."""
    attempt = state.status.attempt
    unfinished = any(view.attempt != attempt and not view.finished for view in state.observation.jobs)
    return unfinished or state.observation.former_alive(attempt) > 0


def _is_obsolete(state: State, former: JobView) -> bool:
    """Return whether a former attempt's Job has to be deleted.

    The last failed Job remains for its pods' logs, also while the Job controller has not failed it yet. Older Jobs, and
    a Job that would continue (after a resize or an OOM kill), are deleted.
    """
    age = state.status.attempt - former.attempt
    if age < 1 or former.deleting:
        return False
    if age > 1:
        return True
    return not former.failed and not is_about_to_fail(former, state)


def _suspend_actions(state: State, attempt_job: JobView) -> list[Action]:
    if attempt_job.finished:
        return []
    if is_queued(state.job, attempt_job):
        # Only the queue may change `suspend`: it resumes a Job that another client suspends, and a Job that another
        # client resumes has no quota.
        if state.spec.suspend:
            return [DeleteJob(attempt_job.name, attempt_job.uid)]
        edited = find_queue_edits(state.job, attempt_job) if attempt_job.suspended else {}
        return [RelabelJob(attempt_job.name, edited)] if edited else []
    if attempt_job.suspended != state.spec.suspend:
        return [SuspendJob(attempt_job.name, state.spec.suspend)]
    return []


def clean_up(state: State) -> Decision:
    """Clean up the child objects of an ended job; delete the resource when its time to live has expired."""
    plan = _PassPlan()
    _follow_remarks(state, plan)
    for view in state.observation.jobs:
        plan.actions += _clean(view, state, plan.waits)
    plan.actions += fail_lost_pods(state, plan.waits)
    facts = [remark.fact for remark in state.remarks if remark.fact is not None]
    status = set_conditions(state.status, facts, state.now, state.job.generation) if facts else state.status
    is_over = status == state.status and not _is_held(state)  # what features report is written first
    ttl = state.spec.ttl_seconds_after_finished
    ended = state.status.completion_time
    if is_over and ttl is not None and ended is not None:
        seconds = (ended + timedelta(seconds=ttl) - state.now).total_seconds()
        if seconds <= 0:
            plan.actions.append(DeleteResource())
        else:
            plan.waits.append(seconds)
    return Decision(status, tuple(plan.actions), min(plan.waits, default=None), is_over=is_over)


def _is_held(state: State) -> bool:
    """Return whether a feature needs the resource of an ended job. None holds it for ever, as a fault could."""
    ended = state.status.completion_time
    is_late = ended is not None and state.now - ended >= LONGEST_HOLD
    return not is_late and any(remark.holds for remark in state.remarks)


def is_about_to_fail(view: JobView, state: State) -> bool:
    """Return whether the Job controller is about to fail a Job whose failure the status records."""
    failure = state.status.last_failure
    if failure is None or failure.attempt != view.attempt or failure.time is None:
        return False
    if state.now - failure.time >= _FAIL_JOB_PATIENCE:
        return False
    return any(pod.fails_job for pod in state.observation.pods_of(view.attempt))


def _clean(view: JobView, state: State, waits: list[float]) -> list[Action]:
    """Return the actions on one Job of an ended job."""
    if view.deleting:
        return []
    about_to_fail = is_about_to_fail(view, state)
    if view.attempt < state.status.attempt and not view.finished and not about_to_fail:
        # An operator that had lost leadership created it; no decision of this operator did.
        return [DeleteJob(view.name, view.uid)]
    if state.spec.clean_pod_policy == "All":
        return [DeleteJob(view.name, view.uid)]
    if state.spec.clean_pod_policy == "None" or view.finished:
        return []
    if about_to_fail:
        waits.append(LATER)
        return []
    if is_queued(state.job, view):
        return [DeleteJob(view.name, view.uid)]  # a queue would admit a suspended Job again
    # A suspended Job terminates the running pods and keeps the ended ones, with their logs.
    return [] if view.suspended else [SuspendJob(view.name, True)]


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
