"""The state machine: (resource, observation, now) -> Decision. Pure, idempotent, level-triggered.

The ledger in status (attempt, attemptNodes, restarts, lastFailure, the terminal conditions) says what shall be;
children are made to follow it. Nothing about the past is kept elsewhere, so a restarted operator goes on from what it
reads.
"""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from msgspec.structs import replace

from ddp_operator import __version__, constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import Status
from ddp_operator.status import attempts, budget, lost_nodes
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact, set_conditions
from ddp_operator.status.converge import (
    NODE_PATIENCE,
    RECHECK_REFUSAL,
    SOON,
    blocked_by_avoidance,
    can_resize,
    clean_up,
    converge,
    find_late_joiner_deadline,
)
from ddp_operator.status.decision import Decision, Refusal
from ddp_operator.status.describe import without_eta
from ddp_operator.status.diagnosis import Diagnosis, blame_image, diagnose, is_guess
from ddp_operator.status.inputs import fetch_inputs
from ddp_operator.status.node_health import nodes_to_leave
from ddp_operator.status.observation import Observation, State
from ddp_operator.status.replacement import is_replaced, is_replacing
from ddp_operator.status.usage import account
from ddp_operator.status.views import PodView
from ddp_operator.status.waiting import (
    active_deadline,
    pending_deadline,
    size_waits,
    waiting_since,
    was_suspending,
)

# While a silent pod is waited for: of its node no event tells.
_RECHECK_NODE = 5.0
# A spec mostly stays bad until it is edited, but what an API server takes can be changed on its side too.
_RECHECK_SPEC = 300.0
_REMEDY = (
    f"the definition {constants.CRD_NAME} in the cluster is not that of this operator (version {__version__}): upgrade "
    "the operator, or apply the definition of its version"
)
_UNATTENDED = "the job's pods keep running, but no failure, suspension or change of size is handled"


def decide(
    job: DDPTrainingJob,
    observation: Observation,
    now: datetime,
    refusal: Refusal | None = None,
    progress_interval: float = 10.0,
) -> Decision:
    """Return what to write and what to do. ``refusal``: the spec as it stands cannot be carried out."""
    if is_finished(job.status):
        return clean_up(job, observation, now)
    state = State(job, observation, now, refusal)
    decision = _decide(state, progress_interval)
    return dataclasses.replace(decision, status=account(state, decision.status))


def _decide(state: State, progress_interval: float) -> Decision:
    job, observation, now, refusal, status = state.job, state.observation, state.now, state.refusal, state.status
    newest = max(observation.jobs, key=lambda view: view.attempt, default=None)
    if newest is not None and newest.attempt > status.attempt:
        return attempts.recover(state, newest)
    if refusal is not None and status.attempt == 0:
        return _reject(state, refusal)
    if status.attempt == 0:
        return fetch_inputs(state, progress_interval) or converge(attempts.start(state), progress_interval)
    attempt_job, pods = state.attempt_job, state.pods
    if _is_enough(state):
        return attempts.succeed(state)
    if attempt_job is not None and attempt_job.complete:
        unseen = pods.counts(status.attempt_nodes).succeeded < status.attempt_nodes
        return dataclasses.replace(attempts.succeed(state), needs_fresh_read=unseen)
    noted = attempts.note_restart_in_place(state)
    if noted is not None:
        return noted
    lost_now = lost_nodes.lost_pods(job, observation, now)
    if lost_now and not {pod.node_name for pod, _ in lost_now} <= set(status.failed_nodes):
        return attempts.record_lost_nodes(state, lost_now, explains=_explains(state, lost_now))
    if not job.spec.suspend:
        diagnosis = diagnose(
            status.attempt,
            attempt_job,
            pods,
            now,
            is_replaced=partial(is_replaced, state),
            since=now if was_suspending(job) else waiting_since(job, attempt_job),
            nodes=observation.nodes,
        )
        if diagnosis is not None:
            decision = _answer_failure(state, diagnosis)
            unseen = diagnosis.secondary_only and any(pod.alive for pod in pods)
            return dataclasses.replace(decision, needs_fresh_read=unseen)
        deadline = active_deadline(job, attempt_job, now)
        if deadline is not None and now >= deadline:
            message = f"active for longer than activeDeadlineSeconds ({job.spec.active_deadline_seconds})"
            return attempts.fail(state, None, c.DEADLINE_EXCEEDED, message)
        pending = pending_deadline(job, attempt_job, pods, now)
        if pending is not None and now >= pending:
            scheduled = status.condition(c.SCHEDULED)
            last = f"; last: {scheduled.message}" if scheduled and scheduled.status == "False" else ""
            message = (
                f"not all pods were running within pendingDeadlineSeconds ({job.spec.pending_deadline_seconds}){last}"
            )
            cause = blame_image(status.attempt, pods, now)
            return attempts.fail(state, cause, c.PENDING_DEADLINE_EXCEEDED, message)
    if job.spec.nodes != status.attempt_nodes and refusal is None and not size_waits(job, attempt_job):
        if attempt_job is not None and can_resize(state, attempt_job):
            return attempts.resize_in_place(state)
        return attempts.resize(state)
    leaving = nodes_to_leave(state) if refusal is None else ()
    if leaving:
        return attempts.leave_nodes(state, leaving)
    blocked = blocked_by_avoidance(pods)
    if blocked is not None and now - blocked[0] >= NODE_PATIENCE and refusal is None:
        return attempts.readmit_nodes(state, blocked[1])
    return converge(state, progress_interval)


def _is_enough(state: State) -> bool:
    """Tell whether the pods that have succeeded are all that it takes; the others may fail when they are left alone."""
    if state.spec.success_policy == "RankZero":
        return any(pod.index == 0 and pod.phase == "Succeeded" for pod in state.pods)
    if state.job.spares:  # they wait for nothing any more
        newest, counts = state.pods.newest, state.pods.counts(state.status.attempt_nodes)
        return counts.succeeded == counts.desired and not counts.failed and newest[0].phase == "Succeeded"
    over = find_late_joiner_deadline(state)
    return over is not None and state.now >= over


def is_finished(status: Status) -> bool:
    """Tell whether the job has ended for good. Terminal states absorb: nothing observed later changes them."""
    return status.is_true(c.SUCCEEDED) or status.is_true(c.FAILED)


def _answer_failure(state: State, diagnosis: Diagnosis) -> Decision:
    cause = diagnosis.cause
    if cause is None:
        return _await_report(state, diagnosis)
    final = budget.is_final(state.job, diagnosis, state.pods, state.now)
    if final is not None:
        return attempts.fail(state, cause, *final)
    free = _why_free(state, diagnosis)
    if free:
        return attempts.restart_free(state, cause, free)
    charged = budget.charge(state.job, cause, state.pods, state.now)
    limit = budget.find_limit(state.job, cause, charged)
    if limit is not None:
        return attempts.fail(state, cause, *limit)
    return attempts.restart(state, cause, charged)


def _why_free(state: State, diagnosis: Diagnosis) -> str:
    """Return the reason of Restarting for a failure that costs nothing; empty: it is charged to the budget."""
    if diagnosis.disruption and not state.spec.recovery.count_disruptions:
        return c.DISRUPTED
    if diagnosis.secondary_only and _ended_in_suspension(state):
        return c.RESUMED
    if diagnosis.secondary_only and is_replacing(state):
        return c.DISRUPTED  # the others have waited for a new pod as long as they may
    if diagnosis.secondary_only and state.attempt_job is not None and state.attempt_job.suspended:
        return c.DISRUPTED  # its queue took the pods back
    return ""


def _await_report(state: State, diagnosis: Diagnosis) -> Decision:
    """Say for whom it is waited before a failure counts, and change nothing else."""
    fact = Fact(c.PROGRESSING, "False", c.WAITING_FOR_PEERS, diagnosis.waiting)
    status = replace(
        state.status,
        nodes=state.pods.counts(state.status.attempt_nodes),
        progress=without_eta(state.status.progress),
    )
    status = set_conditions(status, [fact], state.now, state.job.generation)
    left = (diagnosis.until - state.now).total_seconds() + 0.1 if diagnosis.until else SOON
    return Decision(status, requeue_after=min(max(SOON, left), _RECHECK_NODE))


def _ended_in_suspension(state: State) -> bool:
    """Tell whether the attempt ended while its pods were told to stop: a slower one then reports a lost peer."""
    if was_suspending(state.job):
        return True
    failed_at, resumed = state.attempt_job.failed_at if state.attempt_job else None, state.status.start_time
    return failed_at is not None and resumed is not None and failed_at < resumed


def _explains(state: State, found: tuple[tuple[PodView, str], ...]) -> bool:
    """Tell whether lost pods are the reason of the failure after which the current attempt was begun."""
    failure = state.status.last_failure
    attempts = {pod.attempt for pod, _ in found}
    return (
        failure is not None
        and failure.attempt in attempts
        and failure.attempt == state.status.attempt - 1
        and is_guess(failure)
    )


def _reject(state: State, refusal: Refusal) -> Decision:
    undecided = refusal.reason == c.SERVER_ERROR
    facts = [Fact(c.ACCEPTED, "Unknown" if undecided else "False", refusal.reason, refusal.message)]
    status = replace(state.status, phase="Pending" if undecided else "Rejected")
    status = set_conditions(status, facts, state.now, state.job.generation)
    return Decision(status, requeue_after=_RECHECK_SPEC if refusal.reason == c.INVALID_SPEC else RECHECK_REFUSAL)


def report_unreadable(resource: Mapping[str, Any], error: InvalidManifest, now: datetime) -> tuple[Status, Status]:
    """Return the status as it is, and with Accepted=False in it; a job that has ended keeps its own."""
    unattended = f"; until then {_UNATTENDED}" if parse_status(resource).attempt else ""
    return report_refused(resource, Refusal(c.VERSION_MISMATCH, f"{error}; {_REMEDY}{unattended}"), now)


def report_refused(resource: Mapping[str, Any], refusal: Refusal, now: datetime) -> tuple[Status, Status]:
    """Return the same of a job whose spec is not known, and why. One that names what is not there yet waits for it."""
    old = parse_status(resource)
    if is_finished(old):
        return old, old
    generation = (resource.get("metadata") or {}).get("generation") or 0
    waits = refusal.reason in (c.PROFILE_NOT_FOUND, c.RESOURCE_CLAIM_NOT_FOUND)
    begins = "Pending" if waits else "Rejected"
    new = replace(old, phase=old.phase if old.attempt else begins)
    return old, set_conditions(new, [Fact(c.ACCEPTED, "False", refusal.reason, refusal.message)], now, generation)
