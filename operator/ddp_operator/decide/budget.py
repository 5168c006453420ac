"""Restart accounting: count failures against the limits of spec.recovery. Pure.

docs/api.md lists every limit, with the field that changes it.
"""

from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from ddp_operator.api.job import CRASH_LOOP_FAILURES, DDPTrainingJob
from ddp_operator.api.status import LastFailure, Restarts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.diagnosis import Diagnosis
from ddp_operator.decide.observation import Pods
from ddp_operator.decide.progress import record_final_progress
from ddp_operator.decide.restart_accounting import count_new_restarts
from ddp_pod.contract.failure_table import SIGNIFICANT_SECONDS


class RestartLimit(NamedTuple):
    """Why there is no further attempt."""

    reason: str
    """Of the condition Failed."""
    conclusion: str = ""
    """The text; empty if the failure is the only reason."""


def find_permanent_limit(job: DDPTrainingJob, diagnosis: Diagnosis, pods: Pods, now: datetime) -> RestartLimit | None:
    """Return why another attempt would fail in the same way; None: it may succeed."""
    cause = diagnosis.cause
    if cause is None:
        return None
    if diagnosis.repeated or _is_repeated(job, cause, pods, now):
        return RestartLimit(
            c.REPEATED_FAILURE, f"not restarted: {cause.signature} occurred twice without progress in between"
        )
    return RestartLimit(cause.category) if diagnosis.permanent else None


def count_failure(
    job: DDPTrainingJob, cause: LastFailure, pods: Pods, now: datetime, times: int | None = None
) -> Restarts:
    """Return the restart accounting with a failure of the current attempt counted against ``maxRestarts``.

    ``times``: the number of failures. None: this failure, which ended its pod, and the unobserved failures that the
    launcher handled in that pod.

    A checkpoint that is ``resetAfterSteps`` further resets the count. A step beyond the highest step resets the count
    of failures without progress. If no step is reported, an attempt of ``SIGNIFICANT_SECONDS`` counts as progress.
    """
    status = record_final_progress(job.status, pods, now)
    restarts = status.restarts
    if times is None:
        times = 1 + _count_unobserved(job, cause, pods)

    checkpoint = status.checkpoint.step if status.checkpoint else 0
    step = _find_step(cause, status)
    is_renewed = checkpoint - restarts.checkpoint_step >= job.spec.recovery.reset_after_steps
    has_progress = step > restarts.step or (step == 0 and _has_lasted(pods))
    return replace(
        restarts,
        used=times if is_renewed else restarts.used + times,
        counted=restarts.counted + times,
        checkpoint_step=checkpoint if is_renewed or restarts.used == 0 else restarts.checkpoint_step,
        without_progress=0 if has_progress else restarts.without_progress + times,
        step=max(step, restarts.step),
    )


def _count_unobserved(job: DDPTrainingJob, cause: LastFailure, pods: Pods) -> int:
    """Return the restarts in the failed pod that the operator has not counted yet, at most the remaining budget."""
    if not job.counts_in_place or job.spec.elastic is not None:
        return 0
    end = next((pod.termination for pod in pods if pod.name == cause.pod and pod.termination), None)
    if end is None:
        return 0
    unobserved = count_new_restarts(job.status, end.restarts)
    return max(0, min(unobserved, job.restarts_left))


def find_limit(job: DDPTrainingJob, cause: LastFailure, counted: Restarts) -> RestartLimit | None:
    """Return the limit that a counted failure exceeds; None: another attempt follows."""
    limit = job.spec.recovery.max_restarts
    if counted.used > limit:
        return RestartLimit(c.RESTART_BUDGET_EXHAUSTED, _describe_exhausted(counted, limit))
    if counted.without_progress >= CRASH_LOOP_FAILURES and not cause.container:
        place = f"beyond step {counted.step}" if counted.step else "before the first step"
        return RestartLimit(c.CRASH_LOOP, f"failed {counted.without_progress} times in a row without progress {place}")
    return None


def _describe_exhausted(counted: Restarts, limit: int) -> str:
    if counted.used == 1:
        return f"not restarted: recovery.maxRestarts is {limit}"
    since = f" since step {counted.checkpoint_step}" if counted.counted > counted.used else ""
    return f"failed {counted.used} times{since}, recovery.maxRestarts is {limit}"


def _find_step(cause: LastFailure, status: Status) -> int:
    """Return the run's step at the failure; 0: unknown.

    The failing rank reports its exact step. The page of pod 0 is some seconds older.
    """
    return cause.step or (status.progress.step if status.progress else None) or 0


def _is_repeated(job: DDPTrainingJob, cause: LastFailure, pods: Pods, now: datetime) -> bool:
    """Return whether a failure of the current attempt equals the last one, without progress in between."""
    last = job.status.last_failure
    if last is None or not cause.signature or cause.signature != last.signature:
        return False
    if (cause.pod, cause.time) == (last.pod, last.time):
        return False  # the operator has already read this failure from the pod's page
    step = _find_step(cause, record_final_progress(job.status, pods, now))
    if step:
        return step <= max(last.step or 0, job.status.restarts.step)
    return not _has_lasted(pods)


def _has_lasted(pods: Pods) -> bool:
    """Return whether a pod of the attempt ran long enough to count as progress."""
    for pod in pods:
        end = pod.termination
        if pod.started and end and end.time and end.time - pod.started.timestamp() >= SIGNIFICANT_SECONDS:
            return True
    return False
