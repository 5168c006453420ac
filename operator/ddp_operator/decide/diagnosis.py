"""Diagnose an attempt: whether it failed, and its root cause, the earliest failure that is not secondary. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.job import SILENT_POD_SECONDS, SILENT_START_SECONDS
from ddp_operator.api.kubeobjects import EPOCH, format_time, truncate
from ddp_operator.api.status import LastFailure
from ddp_operator.decide import conditions as c
from ddp_operator.decide.failures import HIDDEN_FAILURE_REMEDY, Termination, complete_end, describe_rank_end
from ddp_operator.decide.kueue import find_waiting_start, was_suspending
from ddp_operator.decide.losses import find_node_problem, is_lost_with_node, is_replaced
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import State
from ddp_operator.decide.views import UNSEEN, JobView, Pods, PodView
from ddp_pod.contract.failure_record import order_causes
from ddp_pod.contract.failure_table import (
    CATEGORIES,
    IMAGE_PULL,
    KILLED,
    NODE_LOST,
    OOM,
    POD_DELETED,
    PREEMPTED,
    UNKNOWN,
    USER_ERROR,
    Category,
)

# A pod killed earlier than this before the first secondary failure was replaced in between, so it is not the cause.
_SAME_INCIDENT = timedelta(seconds=120)
_MAX_MESSAGE = 1024

MOST_FAILURES = 128
"""Pods whose pages are read for the failure before a restart in the same pods."""

PodEnd = tuple[PodView, Termination]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """An attempt's failure.

    ``cause`` is None while pods report only secondary failures and another pod may still report the cause: ``waiting``
    describes that pod, ``until`` limits the wait.
    """

    cause: LastFailure | None
    permanent: bool = False
    """Whether another attempt would fail as well."""
    disruption: bool = False
    """Whether a pod was deleted, evicted or lost with its node, which is not counted."""
    secondary_only: bool = False
    """Whether all reported failures are secondary."""
    waiting: str = ""
    until: datetime | None = None
    repeated: bool = False
    """Whether the same failure occurred in the pod before, without progress in between."""


def diagnose(state: State) -> Diagnosis | None:
    """Return the diagnosis of the current attempt; None: it has not failed."""
    job = state.attempt_job
    ended = _list_failed_ends(state.pods)
    fatal = [(pod, end) for pod, end in ended if _ends_attempt(pod, end, state)]
    if not fatal and not (job is not None and job.failed):
        return _diagnose_loss(state)
    if state.job.holds_pods and any(end.permanent for _, end in fatal):
        return _diagnose_release(state, fatal)
    return _diagnose_failure(state, ended, fatal)


def _diagnose_failure(state: State, ended: list[PodEnd], fatal: list[PodEnd]) -> Diagnosis:
    """Return the diagnosis of an attempt whose Job, or whose pods have failed.

    From what explains most to what explains least: a rank that hid its failure behind exit code 0, a lost pod or node
    if all else are symptoms, a root cause that a pod reports, a pod that may still report one, the rank for which the
    others have waited, a symptom. Without any root cause the first two conditions hold, too.
    """
    attempt = state.status.attempt
    pods = state.pods
    job = state.attempt_job
    first = _find_first_time(job, fatal)
    roots = [(pod, end) for pod, end in fatal if not end.secondary]
    if all(end.exit_code == constants.EXIT_OK for _, end in roots):  # peers have named a rank that left them
        hidden = _find_hidden_failure(attempt, pods, fatal)
        if hidden is not None:
            return Diagnosis(hidden)
        wait = _wait_for_peers(state, fatal, first) if roots else None
        if wait is not None:
            return wait  # a pod whose ranks have ended reports how, once it ends
    if all(CATEGORIES[end.category].symptom for _, end in roots):
        loss = _find_earlier_loss(state, first)
        if loss is not None:
            return loss
    if roots:
        pod, end = min(roots, key=_order)
        failure = build_last_failure(attempt, _find_named_pod(pods, pod, end), end)
        return Diagnosis(failure, permanent=end.permanent, repeated=end.permanent and end.repeated)

    wait = _wait_for_peers(state, fatal, first)
    if wait is not None:
        return wait
    awaited = _find_awaited(attempt, pods, fatal, first)
    if awaited is not None:
        permanent = awaited.permanent or any(end.permanent for _, end in fatal)
        return Diagnosis(awaited.cause, permanent=permanent)
    return _diagnose_secondary(state, ended, fatal, first)


def _diagnose_release(state: State, fatal: Sequence[PodEnd]) -> Diagnosis:
    """Return the failure of the last run of `ddp dev`, after which the pods were released."""
    dev = state.status.dev
    known = state.status.last_failure
    if dev is not None and dev.result == "Failed" and known is not None:
        return Diagnosis(known, permanent=True)
    pod, end = min(fatal, key=_order)
    failure = build_last_failure(state.status.attempt, _find_named_pod(state.pods, pod, end), end)
    if end.rank is None and end.category in (PREEMPTED.name, KILLED.name):
        message = "a user stopped the last run, and the pods were released"
        failure = replace(failure, category=USER_ERROR.name, message=message, remedy="")
    return Diagnosis(failure, permanent=True)


def _find_hidden_failure(attempt: int, pods: Iterable[PodView], fatal: Sequence[PodEnd]) -> LastFailure | None:
    """Return the failure of a rank that exited with 0, after which its peers have failed; None: no rank reports one."""
    ends = [(pod, end) for pod in pods if pod.termination for end in pod.termination.ends]
    found = next(((pod, end) for pod, end in ends if end.exception and not end.secondary), None)
    if found is None or not fatal:
        return None
    pod, end = found
    symptom = build_last_failure(attempt, *min(fatal, key=_order))
    return replace(
        symptom,
        rank=end.rank,
        pod_index=pod.index,
        pod=pod.name,
        node_name=pod.node_name,
        exit_code=constants.EXIT_OK,
        category=USER_ERROR.name,
        message=f"{describe_rank_end(end)}, and its peers have lost it",
        traceback="",
        remedy=HIDDEN_FAILURE_REMEDY,
    )


def _find_awaited(
    attempt: int, pods: Iterable[PodView], fatal: Sequence[PodEnd], first: datetime | None
) -> Diagnosis | None:
    """Return the rank outside of collectives for which the failed ranks have waited; None: no pod reports one.

    A pod that was stopped before the ``first`` failure did not let its peers wait. A rank that computes is not called a
    hang: the category remains that of the first symptom.
    """
    ends = [(pod, pod.termination) for pod in pods if pod.termination]
    reports = [
        (pod, complete_end(end.awaited, end.awaited.container_exit_code))
        for pod, end in ends
        if end.awaited and (end.container_exit_code != constants.EXIT_PREEMPTED or _was_stopped(end, first))
    ]
    if not reports or not fatal:
        return None
    # A rank whose line is known explains more than one of which only the silence is.
    pod, cause = min(reports, key=lambda report: (not report[1].traceback, _order(report)))
    failure = build_last_failure(attempt, pod, cause)
    if cause.secondary:
        failure = replace(failure, category=min(fatal, key=_order)[1].category)
    return Diagnosis(failure, permanent=cause.permanent)


def _find_named_pod(pods: Iterable[PodView], reporter: PodView, end: Termination) -> PodView:
    """Return the pod whose rank a report names as the cause: that rank is not a local one of the pod that reports."""
    names_other = end.rank is not None and end.local_rank is None
    return next((pod for pod in pods if names_other and pod.index == end.pod_index), reporter)


def _list_failed_ends(pods: Iterable[PodView]) -> list[PodEnd]:
    ends = ((pod, pod.termination) for pod in pods)
    return [(pod, end) for pod, end in ends if end is not None and end.container_exit_code != constants.EXIT_OK]


def _find_first_time(job: JobView | None, fatal: Iterable[PodEnd]) -> datetime | None:
    """Return when the first pod failed; if no pod reports a time, when the Job failed."""
    times = [end.time for _, end in fatal if end.time is not None]
    if times:
        return datetime.fromtimestamp(min(times), UTC)
    if job is not None and job.failed_at is not None:
        return datetime.fromtimestamp(job.failed_at.timestamp(), UTC)
    return None


def _find_earlier_loss(state: State, first: datetime | None) -> Diagnosis | None:
    """Return the loss of a pod or a node before the ``first`` failure, which explains lost peers better."""
    attempt = state.status.attempt
    lost_pods = [pod for pod in state.pods if _was_lost_before(pod, first, state.attempt_job)]
    if lost_pods:
        failure = _build_loss(attempt, min(lost_pods, key=_loss_order))
        return Diagnosis(failure, disruption=True)
    for pod in state.pods:
        problem = find_node_problem(pod, state.observation.nodes)
        if problem:
            return Diagnosis(build_node_failure(attempt, pod, problem, state.now), disruption=True)
    return None


def _diagnose_secondary(state: State, ended: list[PodEnd], fatal: list[PodEnd], first: datetime | None) -> Diagnosis:
    """Return the diagnosis if no pod reports a root cause: a killed pod is more likely than one that lost its peer."""
    attempt = state.status.attempt
    candidates = [(pod, end) for pod, end in ended if _is_of_incident(end, first) and not _was_stopped(end, first)]
    if not candidates:
        message = (state.attempt_job.failed_message if state.attempt_job else "") or "the Job failed"
        unknown = Termination(category=UNKNOWN.name, message=message, time=(first or state.now).timestamp())
        return Diagnosis(build_last_failure(attempt, None, unknown), secondary_only=True)

    pod, end = min(candidates, key=_order)
    # Where all ranks of all pods wait for each other, every hang is secondary; watchdog.action may still be Fail.
    permanent = any(fatal_end.permanent for _, fatal_end in fatal)
    return Diagnosis(build_last_failure(attempt, pod, end), permanent=permanent, secondary_only=True)


def list_restart_failures(reports: Iterable[tuple[PodView, Page | Termination]]) -> tuple[PodEnd, ...]:
    """Return the failures before restarts in the same pods, which pods report while they run or when they succeed."""
    failures = ((pod, report.last_failure) for pod, report in reports)
    return tuple((pod, complete_end(failure)) for pod, failure in failures if failure is not None and failure.restarts)


def find_restart_cause(attempt: int, failures: tuple[PodEnd, ...]) -> LastFailure | None:
    """Return the root cause of the latest restart in the same pods; None: all reported failures are secondary."""
    roots = [(pod, failure) for pod, failure in failures if not failure.secondary]
    if not roots:
        return None

    latest = max(failure.restarts for _, failure in roots)
    pod, failure = min(((pod, failure) for pod, failure in roots if failure.restarts == latest), key=_order)
    return build_last_failure(attempt, pod, failure)


def find_first_symptom(attempt: int, failures: tuple[PodEnd, ...]) -> LastFailure | None:
    """Return the earliest of the failures before a restart in the same pods, where all of them are secondary."""
    if not failures:
        return None
    pod, failure = min(failures, key=_order)
    return build_last_failure(attempt, pod, failure)


def build_unseen_loss(attempt: int, successor: PodView) -> LastFailure:
    """Return the loss of a pod of which only its ``successor`` was observed."""
    message = f"the pod before {successor.name} was lost while no operator watched"
    failure = build_failure(attempt, successor, PREEMPTED, message, successor.created)
    return replace(failure, pod="", node_name="")


def build_node_failure(attempt: int, pod: PodView, message: str, now: datetime) -> LastFailure:
    """Return the failure of a pod whose node is lost."""
    return build_failure(attempt, pod, NODE_LOST, f"the pod was lost with its node: {message}", now)


def build_image_failure(attempt: int, pods: Pods, now: datetime) -> LastFailure | None:
    """Return the failure of an attempt whose image was not pulled; None: it waits for another reason."""
    for pod in pods.newest.values():
        if pod.alive and pod.waiting_reason == c.IMAGE_PULL:
            return build_failure(attempt, pod, IMAGE_PULL, pod.waiting_message[:_MAX_MESSAGE], now)
    return None


def is_inferred(failure: LastFailure) -> bool:
    """Return whether surviving pods only inferred a failure; a lost node explains it better."""
    category = CATEGORIES.get(failure.category, UNKNOWN)
    return category.vague or (category is NODE_LOST and failure.rank is not None)


def _diagnose_loss(state: State) -> Diagnosis | None:
    """Diagnose an attempt that lost a pod while its Job runs: it would wait for the Job controller's back-off."""
    attempt = state.status.attempt
    lost = [pod for pod in list_lost_pods(state) if not is_replaced(state, pod)]
    disrupted = [pod for pod in lost if pod.disrupted or pod.deleting]
    if disrupted:
        return Diagnosis(_build_loss(attempt, min(disrupted, key=_loss_order)), disruption=True)
    killed = [(pod, pod.termination) for pod in lost if pod.termination]
    if killed:
        # A script that exits with the code for preemption is counted; otherwise it would be restarted forever.
        pod, end = min(killed, key=_order)
        # The new pods of `ddp dev` start no run.
        return Diagnosis(build_last_failure(attempt, pod, end), disruption=state.job.holds_pods)
    return None


def _is_active(job: JobView) -> bool:
    """Return whether a Job runs, so that neither its end nor a suspension, current or recent, deleted its lost pods."""
    is_resuming = job.suspend_changed is not None and job.started is None
    return not (job.finished or job.deleting or job.suspended or is_resuming)


def list_lost_pods(state: State) -> list[PodView]:
    """Return the pods of a running Job that ran and have no running successor, without those that ended with it."""
    job = state.attempt_job
    if job is None or not _is_active(job):
        return []

    # A suspension deleted the pods that were deleted before.
    since = state.now if was_suspending(state.job) else find_waiting_start(state.job, job)
    # Times have whole seconds: a pod that was deleted in the second of the resumption had run before it.
    resumed = job.suspend_changed + timedelta(seconds=1) if job.suspend_changed else None
    before = max(filter(None, (since, resumed)), default=None)
    running = {pod.index for pod in state.pods if pod.alive and pod.has_run and not pod.deleting and not pod.disrupted}

    lost = []
    for pod in state.pods:
        was_suspended = before is not None and pod.deleted_at is not None and pod.deleted_at < before
        if pod.has_run and pod.phase != "Succeeded" and pod.index not in running and not was_suspended:
            lost.append(pod)
    return lost


def _was_lost_before(pod: PodView, first: datetime | None, job: JobView | None) -> bool:
    """Return whether a pod was lost before its peers failed."""
    if pod.disrupted:
        end = pod.termination
        return end is None or _is_of_incident(end, first)

    # The Job controller deletes the remaining pods of a failed Job. Deletions have the time of its clock.
    failed = (job.failed_at if job else None) or first
    if pod.phase == "Succeeded" or pod.deleted_at is None or failed is None:
        return False
    return timedelta(0) < failed - pod.deleted_at <= _SAME_INCIDENT


def find_disruption(attempt: int, pods: Iterable[PodView]) -> LastFailure | None:
    """Return the loss of the pod that was deleted, evicted or preempted first; None: no pod was."""
    lost = [pod for pod in pods if pod.has_run and pod.phase != "Succeeded" and (pod.disrupted or pod.deleting)]
    return _build_loss(attempt, min(lost, key=_loss_order)) if lost else None


def find_kill_of_pod(attempt: int, pods: Iterable[PodView]) -> LastFailure | None:
    """Return the failure of the pod that was killed first, such as one of `ddp dev` for memory; None: no pod was."""
    killed = [(pod, pod.termination) for pod in pods if pod.phase == "Failed" and pod.termination]
    return build_last_failure(attempt, *min(killed, key=_order)) if killed else None


def _build_loss(attempt: int, pod: PodView) -> LastFailure:
    category = PREEMPTED if pod.disrupted else POD_DELETED
    if is_lost_with_node(pod) or pod.disruption == UNSEEN:
        category = NODE_LOST
    reason = f"{pod.disruption}: {pod.disruption_message}" if pod.disrupted else "it was deleted"
    end = pod.termination
    time = pod.deleted_at
    if end is not None and end.time is not None:
        time = datetime.fromtimestamp(end.time, UTC)
    exit_code = end.exit_code if end is not None else None
    return build_failure(attempt, pod, category, f"the pod was lost: {reason}".rstrip(": "), time, exit_code)


def build_failure(
    attempt: int, pod: PodView, category: Category, message: str, time: datetime | None, exit_code: int | None = None
) -> LastFailure:
    """Return a failure of a pod that the pod itself does not report."""
    seconds = None if time is None else time.timestamp()
    end = Termination(
        category=category.name, exit_code=exit_code, message=message, remedy=category.remedy, time=seconds
    )
    return build_last_failure(attempt, pod, end)


def build_last_failure(attempt: int, pod: PodView | None, end: Termination) -> LastFailure:
    """Return the end of a pod as ``status.lastFailure``. ``pod``: None: it is unknown which one failed."""
    failure = LastFailure(
        attempt=attempt,
        rank=end.rank,
        container=end.container,
        exit_code=end.exit_code,
        category=end.category,
        message=end.message,
        traceback=end.traceback,
        remedy=end.remedy,
        time=None if end.time is None else truncate(datetime.fromtimestamp(end.time, UTC)),
        signature=end.signature,
        step=None if end.step is None else int(end.step),
    )
    if pod is None:
        return failure
    return replace(failure, pod_index=pod.index, pod=pod.name, node_name=pod.node_name)


def _loss_order(pod: PodView) -> tuple[bool, datetime, int, str]:
    return (not pod.disrupted, pod.deleted_at or EPOCH, pod.index, pod.name)


def _ends_attempt(pod: PodView, end: Termination, state: State) -> bool:
    if (end.category == OOM.name and not state.job.holds_pods) or end.ended_by_probe:
        # The exit code is that of a lost pod, but a new pod would reach the same limit, or fail the same probe.
        return True
    return end.container_exit_code not in constants.REPLACED_EXIT_CODES and not pod.disrupted


def _wait_for_peers(state: State, failed: list[PodEnd], since: datetime | None) -> Diagnosis | None:
    """Return the wait for pods that may still report the cause; None: the wait is over."""
    silent = sorted((pod for pod in state.pods if pod.alive), key=lambda pod: (not pod.has_run, pod.index))
    if since is None or not silent:
        return None
    peer = silent[0]
    limit = timedelta(seconds=SILENT_POD_SECONDS if peer.has_run else SILENT_START_SECONDS)
    if abs(state.now - since) > limit:  # also if clocks differ by more than the limit
        return None

    until = since + limit
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    verb = "have" if more else "has"
    text = (
        f"{_describe_reports(failed)}; pod {peer.index} ({peer.name}, node {peer.node_name or 'unknown'}){more} {verb} "
        f"neither ended nor reported: waiting until {format_time(until)}, in case its node is lost"
    )
    return Diagnosis(None, waiting=text, until=until)


def _describe_reports(failed: list[PodEnd]) -> str:
    if not failed:
        return "the Job has failed"
    pod, end = min(failed, key=_order)
    return f"pod {pod.index} reports a secondary failure ({end.category})"


def _was_stopped(end: Termination, first: datetime | None) -> bool:
    """Return whether a pod stopped on request, when the Job controller deleted the remaining pods of a failed Job."""
    stopped = end.container_exit_code == constants.EXIT_PREEMPTED
    return stopped and first is not None and end.time is not None and end.time > first.timestamp()


def _is_of_incident(end: Termination, first: datetime | None) -> bool:
    if end.time is None or first is None:
        return True
    return first - datetime.fromtimestamp(end.time, UTC) <= _SAME_INCIDENT


def _order(pod_end: PodEnd) -> tuple[tuple[bool, bool, float], int, str]:
    pod, end = pod_end
    return order_causes(end), pod.index, pod.name
