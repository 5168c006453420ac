"""Whether a failure is answered by another attempt. Every limit here is in docs/api.md, with where to change it."""

from datetime import datetime

from msgspec.structs import replace

from ddp_operator.api.job import CRASH_LOOP_FAILURES, DDPTrainingJob
from ddp_operator.api.status import LastFailure, Restarts, Status
from ddp_operator.launcher.failure_table import SIGNIFICANT_SECONDS
from ddp_operator.status import conditions as c
from ddp_operator.status.diagnosis import Diagnosis
from ddp_operator.status.observation import Pods
from ddp_operator.status.progress import take_final_progress
from ddp_operator.status.restart_accounting import count_new_restarts

Limit = tuple[str, str]
"""Why there is no further attempt: the reason of the condition Failed, and the conclusion."""


def is_final(job: DDPTrainingJob, diagnosis: Diagnosis, pods: Pods, now: datetime) -> Limit | None:
    """Return why another attempt would end alike, whatever is left of the budget; None: it might not."""
    cause = diagnosis.cause
    if cause is None:
        return None
    if diagnosis.repeated or _is_repeated(job, cause, pods, now):
        return c.REPEATED_FAILURE, f"the same {cause.signature} twice without progress in between, not tried again"
    return (cause.category, "") if diagnosis.permanent else None


def charge(job: DDPTrainingJob, cause: LastFailure, pods: Pods, now: datetime, times: int | None = None) -> Restarts:
    """Return the budget with a failure of the current attempt charged to it.

    ``times``: how many failures, where they were not seen apart. None: this one, which ended its pod, and those that
    the pod has answered itself without anybody having seen it.

    Checkpointed progress renews it; a step beyond the farthest one ends a row of failures without progress. Where no
    step is ever reported, an attempt that lasted counts as progress.
    """
    status = take_final_progress(job.status, pods, now)
    restarts = status.restarts
    if times is None:
        ended = next((pod.termination for pod in pods if pod.name == cause.pod and pod.termination), None)
        apart = ended is None or not job.counts_in_place or job.spec.elastic is not None
        unseen = 0 if apart or ended is None else count_new_restarts(job.status, ended.restarts)
        times = 1 + max(0, min(unseen, job.spec.recovery.max_restarts - restarts.used))
    checkpoint = status.checkpoint.step if status.checkpoint else 0
    step = _find_step(cause, status)
    renewed = checkpoint - restarts.checkpoint_step >= job.spec.recovery.reset_after_steps
    moved = step > restarts.step or (step == 0 and _lasted(pods))
    return replace(
        restarts,
        used=times if renewed else restarts.used + times,
        counted=restarts.counted + times,
        checkpoint_step=checkpoint if renewed or restarts.used == 0 else restarts.checkpoint_step,
        without_progress=0 if moved else restarts.without_progress + times,
        step=max(step, restarts.step),
    )


def find_limit(job: DDPTrainingJob, cause: LastFailure, charged: Restarts) -> Limit | None:
    """Return the limit that a charged failure exceeds; None: another attempt follows."""
    limit = job.spec.recovery.max_restarts
    if charged.used > limit:
        since = f" since step {charged.checkpoint_step}" if charged.counted > charged.used else ""
        often = f"failed {charged.used} times{since}" if charged.used > 1 else "not started again"
        joint = ", " if charged.used > 1 else ", as "
        return c.RESTART_BUDGET_EXHAUSTED, f"{often}{joint}recovery.maxRestarts is {limit}"
    if charged.without_progress >= CRASH_LOOP_FAILURES and not cause.container:
        at = f"beyond step {charged.step}" if charged.step else "before the first step"
        return c.CRASH_LOOP, f"failed {charged.without_progress} times in a row without progress {at}"
    return None


def _find_step(cause: LastFailure, status: Status) -> int:
    """Return how far the run was, 0 where nobody has said it.

    What the failing rank itself reported at its end is exact; pod 0's page was read some seconds before.
    """
    return cause.step or (status.progress.step if status.progress else None) or 0


def _is_repeated(job: DDPTrainingJob, cause: LastFailure, pods: Pods, now: datetime) -> bool:
    """Tell whether a failure of the current attempt is the same as the last one, without progress in between."""
    last = job.status.last_failure
    if last is None or not cause.signature or cause.signature != last.signature:
        return False
    if (cause.pod, cause.time) == (last.pod, last.time):
        return False  # it is that very one, which was seen on the pod's page
    step = _find_step(cause, take_final_progress(job.status, pods, now))
    if step:
        return step <= max(last.step or 0, job.status.restarts.step)
    return not _lasted(pods)


def _lasted(pods: Pods) -> bool:
    ends = [(pod.started, pod.termination.time) for pod in pods if pod.termination]
    return any(start and end and end - start.timestamp() >= SIGNIFICANT_SECONDS for start, end in ends)
