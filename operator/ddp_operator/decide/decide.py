"""The state machine: (resource, observation, now) -> Decision. Pure, idempotent, level-triggered.

The status records the attempt (attempt, its nodes, counts, lastFailure, the terminal conditions), which is the
desired state of the child objects. It is the only memory of the past, so a restarted operator continues from it.
"""

import dataclasses
from collections.abc import Callable
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import LastFailure
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import count_failure, find_limit, find_permanent_limit
from ddp_operator.decide.attempts import (
    contradicts,
    fail,
    leave_nodes,
    note_new_run,
    note_restart_in_place,
    note_unseen_replacement,
    readmit_nodes,
    record_lost_nodes,
    recover,
    resize,
    resize_in_place,
    restart,
    restart_without_counting,
    start,
    succeed,
)
from ddp_operator.decide.conditions import Fact, is_finished, set_conditions, summarize
from ddp_operator.decide.converge import (
    NODE_PATIENCE,
    RECHECK_REFUSAL,
    SOON,
    can_resize,
    clean_up,
    compute_active_deadline,
    compute_pending_deadline,
    converge,
    find_avoidance_block,
    find_late_joiner_deadline,
)
from ddp_operator.decide.diagnosis import Diagnosis, build_image_failure, diagnose, is_inferred
from ddp_operator.decide.kueue import is_resize_waiting, was_suspending
from ddp_operator.decide.losses import find_lost_pods, is_replacing, list_nodes_to_leave
from ddp_operator.decide.state import AT_ONCE, NO_HOOKS, Decision, Observation, PassHooks, Refusal, State
from ddp_operator.decide.views import JobView, PodView

# Interval while the decision waits for a pod that does not report: a change of its node sends no event.
_RECHECK_NODE = 5.0
# An invalid spec usually becomes valid by an edit, which sends an event, but the API server's rules can change too.
_RECHECK_SPEC = 300.0


def decide(
    job: DDPTrainingJob,
    observation: Observation,
    now: datetime,
    refusal: Refusal | None = None,
    progress_interval: float = 10.0,
    hooks: PassHooks = NO_HOOKS,
) -> Decision:
    """Return the status to write and the actions. ``refusal``: why the present spec cannot be carried out."""
    state = State(job, observation, now, refusal, hooks)
    newest = _find_newest_job(state)
    if is_finished(job.status) and (newest is None or not contradicts(state, newest)):
        return clean_up(state)
    decision = _decide(state, progress_interval)
    status = hooks.account(state, summarize(decision.status, job.spec))
    return dataclasses.replace(decision, status=status)


def _decide(state: State, progress_interval: float) -> Decision:
    recovered = _recover_attempt(state)
    if recovered is not None:
        return recovered
    if state.status.attempt == 0:
        return _begin_job(state, progress_interval)

    for step in _STEPS:
        decision = step(state)
        if decision is not None:
            return decision
    return converge(state, progress_interval)


def _recover_attempt(state: State) -> Decision | None:
    """Record the attempt of the newest Job if the status is older, or contradicts it."""
    newest = _find_newest_job(state)
    if newest is None:
        return None
    if newest.attempt > state.status.attempt:
        return recover(state, newest)
    if contradicts(state, newest):
        return dataclasses.replace(recover(state, newest), needs_fresh_read=True)
    return None


def _find_newest_job(state: State) -> JobView | None:
    return max(state.observation.jobs, key=lambda view: view.attempt, default=None)


def _begin_job(state: State, progress_interval: float) -> Decision:
    """Reject the job, prepare it, or start attempt 1."""
    prepared = state.refusal or state.hooks.prepare(state, progress_interval)
    if isinstance(prepared, Refusal):
        return _reject(state, prepared)
    if prepared is not None:
        return prepared
    started = start(state)
    seen = (*state.observation.pods, *state.observation.orphans)
    if any(pod.attempt == 1 for pod in seen):
        # The status was lost, but not the pods: the next pass judges them, before it changes any.
        return Decision(started.status, requeue_after=AT_ONCE)
    return converge(started, progress_interval)


def _complete(state: State) -> Decision | None:
    """End the job if enough pods, or its Job, have succeeded."""
    if _has_succeeded(state):
        return succeed(state)
    if state.attempt_job is None or not state.attempt_job.complete:
        return None
    nodes = state.status.attempt_nodes
    is_watch_late = state.pods.counts(nodes).succeeded < nodes
    return dataclasses.replace(succeed(state), needs_fresh_read=is_watch_late)


def _record_lost_nodes(state: State) -> Decision | None:
    """Record nodes that were lost with pods, before the operator marks these pods as failed."""
    lost = find_lost_pods(state)
    nodes = {pod.node_name for pod, _ in lost}
    if nodes <= set(state.status.failed_nodes):
        return None
    return record_lost_nodes(state, lost, explains=_explains(state, lost))


def _judge_failure(state: State) -> Decision | None:
    """Wait, restart with new pods, or fail the job if the current attempt has failed.

    A lost pod that its Job replaces (``losses.is_replaced``) is not a failure of the attempt.
    """
    diagnosis = None if state.spec.suspend else diagnose(state)
    if diagnosis is None:
        return None
    if diagnosis.cause is None:
        return _await_report(state, diagnosis)
    is_uncertain = diagnosis.secondary_only and any(pod.alive for pod in state.pods)
    return dataclasses.replace(_handle_cause(state, diagnosis, diagnosis.cause), needs_fresh_read=is_uncertain)


def _handle_cause(state: State, diagnosis: Diagnosis, cause: LastFailure) -> Decision:
    """Fail the job if a limit is exceeded, otherwise restart it, counted or not."""
    limit = find_permanent_limit(state, diagnosis)
    if limit is not None:
        return fail(state, cause, limit.reason, limit.conclusion)

    reason = _find_uncounted_reason(state, diagnosis)
    if reason:
        return restart_without_counting(state, cause, reason)

    return _restart_counted(state, cause)


def _restart_counted(state: State, cause: LastFailure) -> Decision:
    """Restart the job, unless a limit is exceeded."""
    counts = count_failure(state, cause)
    limit = find_limit(state.job, cause, counts)
    if limit is not None:
        return fail(state, cause, limit.reason, limit.conclusion)
    return restart(state, cause, counts)


def _find_uncounted_reason(state: State, diagnosis: Diagnosis) -> str:
    """Return the reason of the condition Restarting for a failure that is not counted; empty: it is counted."""
    if diagnosis.disruption and not state.spec.recovery.count_disruptions:
        return c.DISRUPTED
    if not diagnosis.secondary_only:
        return ""
    if _ended_in_suspension(state):
        return c.RESUMED
    if is_replacing(state):
        return c.DISRUPTED  # the peers have waited for the replacement until their time limit
    if state.attempt_job is not None and state.attempt_job.suspended:
        return c.DISRUPTED  # the queue has evicted the pods
    return ""


def _ended_in_suspension(state: State) -> bool:
    """Return whether the attempt ended during a suspension: a pod that stops later then reports a lost peer."""
    if was_suspending(state.job):
        return True
    failed_at = state.attempt_job.failed_at if state.attempt_job else None
    resumed = state.status.start_time
    return failed_at is not None and resumed is not None and failed_at < resumed


def _follow_verdict(state: State) -> Decision | None:
    """End an attempt to which a feature objects."""
    verdict = state.hooks.judge(state, has_succeeded=False)
    if verdict is None:
        return None
    if verdict.cause is None or verdict.is_final:
        return fail(state, verdict.cause, verdict.reason, verdict.message)
    return _restart_counted(state, verdict.cause)


def _check_active_deadline(state: State) -> Decision | None:
    """Fail a job that has run for longer than spec.activeDeadlineSeconds."""
    deadline = compute_active_deadline(state.job, state.attempt_job, state.now)
    if state.spec.suspend or deadline is None or state.now < deadline:
        return None
    message = f"active for longer than activeDeadlineSeconds ({state.spec.active_deadline_seconds})"
    return fail(state, None, c.DEADLINE_EXCEEDED, message)


def _check_pending_deadline(state: State) -> Decision | None:
    """Fail a job whose pods have not all run within spec.pendingDeadlineSeconds."""
    deadline = compute_pending_deadline(state.job, state.attempt_job, state.pods, state.now)
    if state.spec.suspend or deadline is None or state.now < deadline:
        return None
    scheduled = state.status.condition(c.SCHEDULED)
    message = f"not all pods were running within pendingDeadlineSeconds ({state.spec.pending_deadline_seconds})"
    if scheduled is not None and scheduled.status == "False":
        message += f"; last: {scheduled.message}"
    cause = build_image_failure(state.status.attempt, state.pods, state.now)
    return fail(state, cause, c.PENDING_DEADLINE_EXCEEDED, message)


def _resize(state: State) -> Decision | None:
    """Change the number of nodes: in place if the Job can be resized, otherwise with a new attempt."""
    if state.spec.nodes == state.status.attempt_nodes or state.refusal is not None:
        return None
    if is_resize_waiting(state.job, state.attempt_job):
        return None
    if state.attempt_job is not None and can_resize(state, state.attempt_job):
        return resize_in_place(state)
    return resize(state)


def _leave_unhealthy_nodes(state: State) -> Decision | None:
    """Start an attempt on other nodes, if a feature requires it."""
    nodes = list_nodes_to_leave(state) if state.refusal is None else {}
    return leave_nodes(state, nodes) if nodes else None


def _readmit_failed_nodes(state: State) -> Decision | None:
    """Start an attempt that may use the failed nodes again, if no other node fits."""
    blocked = find_avoidance_block(state.pods)
    if blocked is None or state.refusal is not None or state.now - blocked.since < NODE_PATIENCE:
        return None
    return readmit_nodes(state, blocked.message)


_STEPS: Final[tuple[Callable[[State], Decision | None], ...]] = (
    _complete,
    note_new_run,
    note_unseen_replacement,
    note_restart_in_place,
    _record_lost_nodes,
    _judge_failure,
    _follow_verdict,
    _check_active_deadline,
    _check_pending_deadline,
    _resize,
    _leave_unhealthy_nodes,
    _readmit_failed_nodes,
)
"""The steps of a pass over a started job in order; the first one that returns a decision ends the pass."""


def _has_succeeded(state: State) -> bool:
    """Return whether enough pods have succeeded. Later failures of their peers do not matter."""
    if state.spec.success_policy == "RankZero":
        return any(pod.index == 0 and pod.phase == "Succeeded" for pod in state.pods)
    if state.job.spares:
        zero = state.pods.newest.get(0)
        if zero is None or zero.phase != "Succeeded":
            return False
        counts = state.pods.counts(state.status.attempt_nodes)
        return counts.succeeded == counts.desired and not counts.failed
    deadline = find_late_joiner_deadline(state)
    return deadline is not None and state.now >= deadline


def _await_report(state: State, diagnosis: Diagnosis) -> Decision:
    """Report the pod whose report decides about a failure, and change nothing else."""
    fact = Fact(c.PROGRESSING, "False", c.WAITING_FOR_PEERS, diagnosis.waiting)
    status = replace(state.status, nodes=state.pods.counts(state.status.attempt_nodes))
    status = set_conditions(status, [fact], state.now, state.job.generation)
    seconds = SOON
    if diagnosis.until is not None:
        seconds = max(SOON, (diagnosis.until - state.now).total_seconds() + 0.1)
    return Decision(status, requeue_after=min(seconds, _RECHECK_NODE))


def _explains(state: State, lost: tuple[tuple[PodView, str], ...]) -> bool:
    """Return whether lost pods are the cause of the failure that preceded the current attempt."""
    failure = state.status.last_failure
    lost_attempts = {pod.attempt for pod, _ in lost}
    return (
        failure is not None
        and failure.attempt in lost_attempts
        and failure.attempt == state.status.attempt - 1
        and is_inferred(failure)
    )


def _reject(state: State, refusal: Refusal) -> Decision:
    undecided = refusal.reason == c.SERVER_ERROR
    facts = [Fact(c.ACCEPTED, "Unknown" if undecided else "False", refusal.reason, refusal.message)]
    waits = undecided or refusal.reason in (c.CLAIM_IN_USE, c.FEATURE_FAULT)  # it starts without a change of the job
    status = replace(state.status, phase="Pending" if waits else "Rejected")
    status = set_conditions(status, facts, state.now, state.job.generation)
    return Decision(status, requeue_after=_RECHECK_SPEC if refusal.reason == c.INVALID_SPEC else RECHECK_REFUSAL)
