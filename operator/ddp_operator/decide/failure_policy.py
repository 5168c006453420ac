"""Decide about a failure of the current attempt: wait, restart with new pods, or fail the job. Pure.

A lost pod that its Job replaces (``replacement.is_replaced``) is not a failure of the attempt.
"""

from dataclasses import dataclass
from functools import partial

from ddp_operator.api.status import LastFailure, Restarts
from ddp_operator.decide import conditions as c
from ddp_operator.decide.budget import RestartLimit, count_failure, find_limit, find_permanent_limit
from ddp_operator.decide.diagnosis import Diagnosis, diagnose
from ddp_operator.decide.observation import State
from ddp_operator.decide.replacement import is_replaced, is_replacing
from ddp_operator.decide.waiting import find_waiting_start, was_suspending


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a failure.

    If ``diagnosis`` has no cause, the operator waits for the report of another pod. With ``limit`` the job fails. With
    ``restarts`` the restart is counted in them; otherwise it is uncounted, and ``reason`` is that of Restarting.
    """

    diagnosis: Diagnosis
    reason: str = ""
    restarts: Restarts | None = None
    limit: RestartLimit | None = None


def judge_attempt(state: State) -> Verdict | None:
    """Return the verdict on the failure of the current attempt; None: it has not failed."""
    job = state.job
    now = state.now
    diagnosis = diagnose(
        state.status.attempt,
        state.attempt_job,
        state.pods,
        now,
        is_replaced=partial(is_replaced, state),
        since=now if was_suspending(job) else find_waiting_start(job, state.attempt_job),
        nodes=state.observation.nodes,
    )
    if diagnosis is None:
        return None
    if diagnosis.cause is None:
        return Verdict(diagnosis)
    return _judge_failure(state, diagnosis, diagnosis.cause)


def _judge_failure(state: State, diagnosis: Diagnosis, cause: LastFailure) -> Verdict:
    limit = find_permanent_limit(state.job, diagnosis, state.pods, state.now)
    if limit is not None:
        return Verdict(diagnosis, limit=limit)

    reason = _find_uncounted_reason(state, diagnosis)
    if reason:
        return Verdict(diagnosis, reason=reason)

    restarts = count_failure(state.job, cause, state.pods, state.now)
    limit = find_limit(state.job, cause, restarts)
    if limit is not None:
        return Verdict(diagnosis, limit=limit)
    return Verdict(diagnosis, restarts=restarts)


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
