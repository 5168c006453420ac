"""Whether an attempt has failed, and why: the earliest root cause across its pods, never a victim's word."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ddp_operator import constants
from ddp_operator.api.status import LastFailure
from ddp_operator.status.observation import JobView, PodView
from ddp_operator.status.termination import Termination, format_time

# Victims often report first: the cause's own pod still writes its traceback. Wait that long for a better witness.
_WITNESS_WAIT = timedelta(seconds=15)
# A pod that was killed longer before the first victim spoke has long been replaced: it is not the cause.
_SAME_INCIDENT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An attempt's failure. ``cause`` is None while only victims have spoken and better may come."""

    cause: LastFailure | None
    permanent: bool = False


def judge(attempt: int, job: JobView | None, pods: tuple[PodView, ...], now: datetime) -> Verdict | None:
    """Return the verdict on an attempt, or None where it has not failed."""
    ended = [(pod, pod.termination) for pod in pods if pod.termination and pod.termination.container_exit_code != 0]
    fatal = [(pod, end) for pod, end in ended if _ends_attempt(pod, end)]
    job_failed = job is not None and job.failed
    if not fatal and not job_failed:
        return None
    culprits = [(pod, end) for pod, end in fatal if not end.victim]
    if culprits:
        pod, end = min(culprits, key=_order)
        return Verdict(_last_failure(attempt, pod, end), permanent=end.container_exit_code == constants.EXIT_USER_ERROR)
    times = [end.time for _, end in fatal if end.time is not None]
    if not times and job is not None and job.failed_at is not None:
        times = [job.failed_at.timestamp()]
    first = datetime.fromtimestamp(min(times), UTC) if times else None
    if any(pod.alive for pod in pods) and not _waited(first, now):
        return Verdict(None)
    # Nobody confessed: a signal-killed pod is a likelier cause than those who lost their peer.
    killed = [(pod, end) for pod, end in ended if _is_of_incident(end, first)]
    if killed:
        pod, end = min(killed, key=lambda item: (item[1].victim, _order(item)))
        return Verdict(_last_failure(attempt, pod, end))
    message = (job.failed_message if job else "") or "the Job failed"
    unknown = constants.CATEGORY_UNKNOWN
    return Verdict(LastFailure(attempt=attempt, category=unknown, message=message, time=format_time(first or now)))


def will_fail_job(pods: tuple[PodView, ...]) -> bool:
    """Tell whether a pod has ended in a way that the Job's podFailurePolicy answers by failing the Job."""
    return any(pod.fails_job for pod in pods)


def _ends_attempt(pod: PodView, end: Termination) -> bool:
    if end.category == constants.CATEGORY_OOM:
        # The kubelet reports SIGKILL for it, and a new pod would meet the same limit.
        return True
    return end.container_exit_code not in constants.REPLACED_EXIT_CODES and not pod.disrupted


def _waited(since: datetime | None, now: datetime) -> bool:
    """Tell whether witnesses had their time; where clocks disagree by more than that, it is not waited for them."""
    return since is None or abs(now - since) > _WITNESS_WAIT


def _is_of_incident(end: Termination, first: datetime | None) -> bool:
    if end.time is None or first is None:
        return True
    return first - datetime.fromtimestamp(end.time, UTC) <= _SAME_INCIDENT


def _order(item: tuple[PodView, Termination]) -> tuple[float, int, str]:
    pod, end = item
    return (end.time if end.time is not None else float("inf"), pod.index, pod.name)


def _last_failure(attempt: int, pod: PodView, termination: Termination) -> LastFailure:
    moment = termination.time
    return LastFailure(
        attempt=attempt,
        rank=termination.rank,
        node=pod.index,
        pod=pod.name,
        node_name=pod.node_name,
        exit_code=termination.exit_code,
        category=termination.category,
        message=termination.message,
        traceback=termination.traceback,
        hint=termination.hint,
        time=None if moment is None else format_time(datetime.fromtimestamp(moment, UTC)),
    )
