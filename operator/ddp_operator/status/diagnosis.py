"""Whether an attempt has failed, and why: the earliest root cause across its pods, not a secondary failure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ddp_operator import constants
from ddp_operator.api.job import SILENT_POD_SECONDS, SILENT_START_SECONDS
from ddp_operator.api.status import LastFailure
from ddp_operator.failures import Termination, parse_termination
from ddp_operator.kubeobjects import EPOCH, format_time, truncate
from ddp_operator.launcher.failure_table import CATEGORIES, IMAGE_PULL, NODE_LOST, OOM, PREEMPTED, UNKNOWN, Category
from ddp_operator.progress import Page
from ddp_operator.status import conditions as c
from ddp_operator.status.lost_nodes import find_node_problem, is_lost_with_node
from ddp_operator.status.observation import Pods
from ddp_operator.status.views import JobView, NodeView, PodView

# A pod that was killed longer before the first secondary failure has long been replaced: it is not the cause.
_SAME_INCIDENT = timedelta(seconds=120)


MOST_FAILURES = 128
"""Pods whose pages are read for the failure behind a restart in the same pods."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """An attempt's failure.

    ``cause`` is None while only secondary failures are reported and better may come: ``waiting`` says which pod is
    waited for, and until when. ``disruption``: a pod was taken away, which is not counted. ``secondary_only``: all
    reports are of secondary failures. ``permanent``: another attempt would fail as well. ``repeated``: the pod itself
    has seen that failure before, without progress in between.
    """

    cause: LastFailure | None
    permanent: bool = False
    disruption: bool = False
    secondary_only: bool = False
    waiting: str = ""
    until: datetime | None = None
    repeated: bool = False


def diagnose(
    attempt: int,
    job: JobView | None,
    pods: tuple[PodView, ...],
    now: datetime,
    *,
    is_replaced: Callable[[PodView], bool] = lambda pod: True,
    since: datetime | None = None,
    nodes: Mapping[str, NodeView] | None = None,
) -> Diagnosis | None:
    """Return the diagnosis of an attempt, or None where it has not failed.

    ``is_replaced``: whether a lost pod gets a successor in the Job; otherwise the attempt is over. What was deleted
    before ``since`` was deleted by a suspension. ``nodes``: those that were asked after.
    """
    ended = [(pod, pod.termination) for pod in pods if pod.termination and pod.termination.container_exit_code != 0]
    fatal = [(pod, end) for pod, end in ended if _ends_attempt(pod, end)]
    job_failed = job is not None and job.failed
    if not fatal and not job_failed:
        return _diagnose_taken(attempt, job, pods, is_replaced, since)
    roots = [(pod, end) for pod, end in fatal if not end.secondary]
    times = [end.time for _, end in fatal if end.time is not None]
    if not times and job is not None and job.failed_at is not None:
        times = [job.failed_at.timestamp()]
    first = datetime.fromtimestamp(min(times), UTC) if times else None
    if all(CATEGORIES[end.category].symptom for _, end in roots):
        taken = [pod for pod in pods if _was_taken_before(pod, first, job)]
        if taken:
            return _disruption(attempt, min(taken, key=_taken_order))
        for pod in pods:
            if problem := find_node_problem(pod, nodes or {}):
                return Diagnosis(blame_node(attempt, pod, problem, now), disruption=True)
    if roots:
        pod, end = min(roots, key=_order)
        repeated = end.permanent and end.repeated
        return Diagnosis(_last_failure(attempt, pod, end), permanent=end.permanent, repeated=repeated)
    if (wait := _wait_for_peers(pods, fatal, first, now)) is not None:
        return wait
    # No root cause was reported: a signal-killed pod is a likelier one than those that lost their peer.
    killed = [(pod, end) for pod, end in ended if _is_of_incident(end, first) and not _was_stopped(end, first)]
    if killed:
        pod, end = min(killed, key=lambda item: (item[1].secondary, _order(item)))
        # Where all ranks of all pods wait for each other, every hang is secondary; watchdog.action may still be Fail.
        permanent = any(one.permanent for _, one in fatal)
        return Diagnosis(_last_failure(attempt, pod, end), permanent=permanent, secondary_only=True)
    message = (job.failed_message if job else "") or "the Job failed"
    failure = LastFailure(attempt=attempt, category=UNKNOWN.name, message=message, time=truncate(first or now))
    return Diagnosis(failure, secondary_only=True)


def read_failures(said: Iterable[tuple[PodView, Page | Termination]]) -> tuple[tuple[PodView, Termination], ...]:
    """Return what pods say, on their pages or at their ends, of the failures after which they restarted the workers."""
    found = ((pod, parse_termination(constants.EXIT_RETRYABLE, text=one.last_failure)) for pod, one in said)
    return tuple((pod, end) for pod, end in found if end.restarts)


def find_in_place(attempt: int, found: tuple[tuple[PodView, Termination], ...]) -> LastFailure | None:
    """Return the root cause of the latest restart in the same pods, or None where only secondary ones are reported."""
    roots = [(pod, end) for pod, end in found if not end.secondary]
    if not roots:
        return None
    latest = max(end.restarts for _, end in roots)
    return _last_failure(attempt, *min((one for one in roots if one[1].restarts == latest), key=_order))


def blame_node(attempt: int, pod: PodView, message: str, now: datetime) -> LastFailure:
    """Return the failure of a pod whose node is lost."""
    return _blame(attempt, pod, NODE_LOST, f"the pod was lost with its node: {message}", now)


def blame_image(attempt: int, pods: Pods, now: datetime) -> LastFailure | None:
    """Return the failure of an attempt whose image never came, or None where it waited for something else."""
    pod = next((pod for pod in pods.newest.values() if pod.alive and pod.waiting_reason == c.IMAGE_PULL), None)
    return None if pod is None else _blame(attempt, pod, IMAGE_PULL, pod.waiting_message[:1024], now)


def is_guess(failure: LastFailure) -> bool:
    """Tell whether a failure is what survivors made of it, so that a lost node explains it better."""
    category = CATEGORIES.get(failure.category, UNKNOWN)
    return category.vague or (category is NODE_LOST and failure.rank is not None)


def _diagnose_taken(
    attempt: int,
    job: JobView | None,
    pods: tuple[PodView, ...],
    is_replaced: Callable[[PodView], bool],
    since: datetime | None,
) -> Diagnosis | None:
    """Diagnose an attempt that lost a pod while its Job goes on: it would wait for the Job controller's back-off."""
    if job is None or job.finished or job.deleting or job.suspended or (job.suspend_changed and job.started is None):
        return None  # its own end takes its pods away, or a suspension, also one that is not lifted yet
    # Whole seconds: what was deleted in the one in which the Job was resumed had run before.
    resumed = job.suspend_changed + timedelta(seconds=1) if job.suspend_changed else None
    before = max(filter(None, (since, resumed)), default=None)
    replaced = {pod.index for pod in pods if pod.alive and pod.has_run and not pod.deleting and not pod.disrupted}
    lost = [
        pod
        for pod in pods
        if pod.has_run
        and pod.phase != "Succeeded"
        and pod.index not in replaced
        and not (before and pod.deleted_at and pod.deleted_at < before)
        and not is_replaced(pod)
    ]
    taken = [pod for pod in lost if pod.disrupted or pod.deleting]
    if taken:
        return _disruption(attempt, min(taken, key=_taken_order))
    killed = [(pod, pod.termination) for pod in lost if pod.termination]
    if killed:
        # A script that says by its own exit code that it was preempted is no disruption: it would go on for ever.
        return Diagnosis(_last_failure(attempt, *min(killed, key=_order)))
    return None


def _was_taken_before(pod: PodView, first: datetime | None, job: JobView | None) -> bool:
    """Tell whether a pod was taken away before its peers failed, not because of it."""
    if pod.disrupted:
        end = pod.termination
        return end is None or _is_of_incident(end, first)
    # The Job controller deletes the other pods of a Job that failed. Its clock is the better one to compare with.
    failed = (job.failed_at if job else None) or first
    if pod.phase == "Succeeded" or pod.deleted_at is None or failed is None:
        return False
    return timedelta(0) < failed - pod.deleted_at <= _SAME_INCIDENT


def find_taken(attempt: int, pods: Iterable[PodView]) -> LastFailure | None:
    """Return the loss of the pod that was taken away first; None: none was."""
    taken = [pod for pod in pods if pod.has_run and pod.phase != "Succeeded" and (pod.disrupted or pod.deleting)]
    return _disruption(attempt, min(taken, key=_taken_order)).cause if taken else None


def _disruption(attempt: int, pod: PodView) -> Diagnosis:
    category = NODE_LOST if is_lost_with_node(pod) else PREEMPTED
    how = f"{pod.disruption}: {pod.disruption_message}" if pod.disrupted else "it was deleted"
    moment = pod.termination.time if pod.termination else None
    time = datetime.fromtimestamp(moment, UTC) if moment is not None else pod.deleted_at
    code = pod.termination.exit_code if pod.termination else None
    failure = _blame(attempt, pod, category, f"the pod was taken away: {how}".rstrip(": "), time, code)
    return Diagnosis(failure, disruption=True)


def _blame(
    attempt: int, pod: PodView, category: Category, message: str, time: datetime | None, exit_code: int | None = None
) -> LastFailure:
    return LastFailure(
        attempt=attempt,
        node=pod.index,
        pod=pod.name,
        node_name=pod.node_name,
        exit_code=exit_code,
        category=category.name,
        message=message,
        hint=category.remedy,
        time=None if time is None else truncate(time),
    )


def _taken_order(pod: PodView) -> tuple[bool, datetime, int, str]:
    return (not pod.disrupted, pod.deleted_at or EPOCH, pod.index, pod.name)


def _ends_attempt(pod: PodView, end: Termination) -> bool:
    if end.category == OOM.name:
        # The kubelet reports SIGKILL for it, and a new pod would meet the same limit.
        return True
    return end.container_exit_code not in constants.REPLACED_EXIT_CODES and not pod.disrupted


def _wait_for_peers(
    pods: tuple[PodView, ...], failed: list[tuple[PodView, Termination]], since: datetime | None, now: datetime
) -> Diagnosis | None:
    """Return for whom and until when to wait: for pods that have neither ended nor reported; None: not any longer."""
    silent = sorted((pod for pod in pods if pod.alive), key=lambda pod: (not pod.has_run, pod.index))
    if since is None or not silent:
        return None
    peer = silent[0]
    wait = timedelta(seconds=SILENT_POD_SECONDS if peer.has_run else SILENT_START_SECONDS)
    if abs(now - since) > wait:  # also where clocks disagree by more than that
        return None
    others = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    report = "the Job has failed"
    if failed:
        pod, end = min(failed, key=_order)
        report = f"pod {pod.index} reports a secondary failure ({end.category})"
    until = since + wait
    text = (
        f"{report}; pod {peer.index} ({peer.name}, node {peer.node_name or 'unknown'}){others} has neither ended nor "
        f"reported: waiting for it until {format_time(until)}, in case its node is lost"
    )
    return Diagnosis(None, waiting=text, until=until)


def _was_stopped(end: Termination, first: datetime | None) -> bool:
    """Tell whether a pod only did as told when the Job controller ended what was left of a Job that had failed."""
    stopped = end.container_exit_code == constants.EXIT_PREEMPTED
    return stopped and first is not None and end.time is not None and end.time > first.timestamp()


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
        container=termination.container,
        exit_code=termination.exit_code,
        category=termination.category,
        message=termination.message,
        traceback=termination.traceback,
        hint=termination.remedy,
        time=None if moment is None else truncate(datetime.fromtimestamp(moment, UTC)),
        signature=termination.signature,
        step=None if termination.step is None else int(termination.step),
    )
