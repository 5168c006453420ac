"""Decisions that the status records: a new attempt, counted restarts, the last failure, the end of the job. Pure.

All functions except ``start`` return a Decision without actions, and request the next pass at once. That pass reads the
recorded status and reconciles the child objects, so a crash in between loses nothing and counts nothing twice.
``contradicts`` recognizes a status that another client has replaced.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from ddp_operator.api import child_names
from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import LastFailure, LastRestart, Phase, RecoveryLevel, RestartCounts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import count_failure, count_new_restarts, find_limit, note_steps
from ddp_operator.decide.avoidance import avoid_lost_nodes, avoid_nodes
from ddp_operator.decide.conditions import Fact, set_conditions
from ddp_operator.decide.describe import describe
from ddp_operator.decide.dev import begin_run, forget_restarts, release_pods
from ddp_operator.decide.diagnosis import (
    build_node_failure,
    build_unseen_loss,
    find_restart_cause,
    list_restart_failures,
)
from ddp_operator.decide.failures import Termination, describe_failure, describe_restart
from ddp_operator.decide.kueue import is_queued, is_resize_waiting
from ddp_operator.decide.losses import (
    find_unseen_successor,
    is_consequence,
    was_lost_lately,
    was_resized_lately,
)
from ddp_operator.decide.report import record_failed_step, record_final_progress
from ddp_operator.decide.state import AT_ONCE, Decision, State, Trouble
from ddp_operator.decide.views import JobView, Pods, PodView
from ddp_pod.contract.failure_table import NODE_FAULT, NODE_LOST, POD_DELETED, PREEMPTED, REPLICAS, SIGNIFICANT_SECONDS

# A pod's clock may be wrong: a failure time older than this is replaced by the current time.
_BELIEVED = timedelta(minutes=10)
# As the Job controller's back-off after a failed pod.
_FIRST_DELAY = timedelta(seconds=10)
_LONGEST_DELAY = timedelta(minutes=6)
PROMPT_DISRUPTIONS = 2
"""Disruptions soon after a restart, and without a step, after which the next attempt starts without a delay."""
_TAKEN_AWAY: Final = (PREEMPTED.name, POD_DELETED.name, NODE_LOST.name)
"""Categories of pods that their run has not ended."""
# A restart, a resize and an avoided node may follow each other before the next Job is created.
_MOST_WITHOUT_JOB: Final = 3


def start(state: State) -> State:
    """Start attempt 1. Its Job is created before the status is written, so a refused job has no attempt.

    If the write of the status is lost, ``recover`` reads the attempt from its Job.
    """
    status = replace(
        state.status,
        attempt=1,
        job_name=child_names.job_name(state.job.name, 1),
        start_time=truncate(state.now),
        attempt_time=truncate(state.now),
        selector=child_names.pod_selector(state.job.name),
    ).remember(nodes=state.spec.nodes)
    return replace_fields(state, job=replace_fields(state.job, status=status))


def recover(state: State, newest: JobView) -> Decision:
    """Record the attempt of the newest Job, whose status was lost or replaced by another client.

    Past restarts count as failures unless the status records more, so that a crash loop does not start from zero.
    """
    counts = state.status.counts
    past = newest.attempt - 1
    if counts.total > past or not has_plausible_counts(counts):
        counts = RestartCounts()
    counted = max(counts.counted, past - counts.free)
    status = replace(
        state.status,
        attempt=newest.attempt,
        job_name=newest.name,
        start_time=state.status.start_time or truncate(state.now),
        attempt_time=truncate(state.now),
        completion_time=None,
        selector=child_names.pod_selector(state.job.name),
    ).remember(
        nodes=state.job.size_of(newest.nodes).nodes,
        restarts=replace(counts, total=past, counted=counted, used=max(counts.used, counted)),
    )
    return _begin(replace_fields(state, refusal=None), status)


def restart(state: State, cause: LastFailure, counts: RestartCounts) -> Decision:
    """Start the next attempt after a failure that is counted in ``counts``."""
    status = _build_next_attempt(state, counts, c.GROUP_RESTART, cause)
    if cause.category in (REPLICAS.name, NODE_FAULT.name):
        status = avoid_nodes(status, [cause.node_name])
    delay = compute_start_delay(status)
    when = f" in {delay.total_seconds():.0f} s" if delay else ""
    which = f"restart {counts.used} of {state.spec.recovery.max_restarts}{when}"
    message = describe_restart(which, cause, status.checkpoint)
    return _begin(state, status, Fact(c.RESTARTING, "True", c.GROUP_RESTART, message))


def compute_start_delay(status: Status) -> timedelta:
    """Return the delay of the attempt's pods after a failed init container, or after disruptions in a row.

    The dependency of an init container, or a node without a disruption, may become available.
    """
    failure = status.last_failure
    in_a_row = status.counts.disrupted_in_a_row - PROMPT_DISRUPTIONS
    if failure is not None and failure.container and failure.attempt == status.attempt - 1:
        in_a_row = max(1, status.counts.without_progress)
    if in_a_row <= 0:
        return timedelta(0)
    return min(_FIRST_DELAY * (1 << min(in_a_row - 1, 10)), _LONGEST_DELAY)


def note_unseen_replacement(state: State) -> Decision | None:
    """Count the replacement of a pod that happened while no operator watched; None: all pods are known."""
    status = state.status
    successor = find_unseen_successor(state)
    if successor is None:
        return None
    loss = build_unseen_loss(status.attempt, successor)
    counts = replace(status.counts, replaced=status.counts.replaced + 1)
    page = state.observation.page
    if page is not None and page.completed_restarts is not None:
        counts = _count_after_change(counts, count_new_restarts(status, page.completed_restarts))
    restart = _build_last_restart(status, state.now, loss, c.POD_REPLACEMENT, level="ReplacedPod")
    noted = replace(status, last_restart=restart, last_failure=loss).remember(restarts=counts)
    return Decision(describe(state, noted), requeue_after=AT_ONCE)


def note_new_run(state: State) -> Decision | None:
    """Record the end of a run of `ddp dev` and the start of another one; None: the pods have the same run."""
    former = state.status.dev
    page = state.observation.page
    if former is None or page is None or page.dev is None or page.dev.run == former.run or state.attempt_job is None:
        return None
    begun = begin_run(state.status, page.dev.run)
    return Decision(describe(state, begun), requeue_after=AT_ONCE)


def note_restart_in_place(state: State) -> Decision | None:
    """Count restarts by the launchers in the same pods, and report them; None: there are no new ones.

    Restarts without a root cause are the consequence of another event, such as a lost pod or a resize, and are not
    counted.
    """
    job = state.job
    status = state.status
    page = state.observation.page
    if page is None or page.completed_restarts is None:
        return None
    new = count_new_restarts(status, page.completed_restarts)
    if not new:
        return None

    cause, counts = _count_in_place(state, state.observation.failures_in_place)
    limit = find_limit(job, cause, counts) if cause is not None and job.counts_in_place else None
    if limit is not None:
        return fail(state, cause, limit.reason, limit.conclusion)

    former = status.last_restart
    restart = _build_last_restart(status, state.now, cause, c.RESTARTED_IN_PLACE, level="SamePods")
    if cause is None and former is not None and (was_lost_lately(state) or was_resized_lately(state)):
        counts = _count_after_change(counts, new)
        restart = replace(former, recovery_seconds=None, level=former.level or "SamePods")
    restart = note_steps(restart, status, _find_last_step(state))
    described = describe(state, replace(status, last_restart=restart).remember(restarts=counts))
    return Decision(described, requeue_after=AT_ONCE)


def _find_last_step(state: State) -> int | None:
    """Return the last step before the restart that pods report now; None: none reports it.

    Each launcher whose workers ended knows their step, also where another pod's failure is the root cause. Pod 0 knows
    it where they were stopped without a failure.
    """
    failures = [failure for _, failure in state.observation.failures_in_place]
    steps = [
        int(failure.step)
        for failure in failures
        if failure.step is not None and count_new_restarts(state.status, failure.restarts)
    ]
    page = state.observation.page
    if page is not None and page.restarted_at is not None:
        steps.append(page.restarted_at)
    return max(steps, default=None)


def _count_after_change(counts: RestartCounts, new: int) -> RestartCounts:
    return replace(counts, in_place_after_loss=counts.in_place_after_loss + new)


def _count_in_place(
    state: State, reported: tuple[tuple[PodView, Termination], ...]
) -> tuple[LastFailure | None, RestartCounts]:
    """Return the root cause of the reported restarts, and the accounting with them; None: they are not counted."""
    status = state.status
    new = tuple((pod, failure) for pod, failure in reported if count_new_restarts(status, failure.restarts))
    cause = find_restart_cause(status.attempt, new)
    if cause is None or is_consequence(state, cause):
        return None, status.counts
    if not state.job.counts_in_place:
        return cause, status.counts
    # Each launcher applies the limit that remained at the start of the attempt.
    times = len({failure.restarts for _, failure in new if not failure.secondary})
    return cause, count_failure(state, cause, times)


def restart_without_counting(state: State, cause: LastFailure | None, reason: str) -> Decision:
    """Start the next attempt after an interruption that is not counted: a disruption, a resumption."""
    cause = _select_first_report(state.status.last_failure, cause)
    status = _build_next_attempt(state, _count_free_restart(state), reason, cause)
    if cause is not None and cause.category == NODE_LOST.name:
        status = avoid_lost_nodes(status, [cause.node_name])
    delay = compute_start_delay(status)
    when = f" in {delay.total_seconds():.0f} s" if delay else ""
    message = describe_restart(f"restart, not counted{when}", cause, status.checkpoint)
    return _begin(state, status, Fact(c.RESTARTING, "True", reason, message))


def _count_disruptions_in_a_row(state: State, reason: str) -> int:
    """Return the number of disruptions in a row, each of which came soon after a restart and without a step."""
    status = state.status
    before = status.last_restart
    if reason not in (c.DISRUPTED, c.DRAINED) or before is None:
        return 0
    step = status.progress.step if status.progress else None
    has_lasted = state.now - before.time >= timedelta(seconds=SIGNIFICANT_SECONDS)
    return 0 if has_lasted or (step or 0) > (before.step or 0) else status.counts.disrupted_in_a_row + 1


def _count_free_restart(state: State) -> RestartCounts:
    """Return the restart accounting with a restart that does not count towards ``maxRestarts``."""
    counts = state.status.counts
    return replace(counts, free=counts.free + 1)


def readmit_nodes(state: State, message: str) -> Decision:
    """Start the next attempt, which may use the failed nodes again because no other node fits."""
    note = f"attempt {state.status.attempt + 1} may use the nodes of status.failedNodes again: {message}"
    return _begin_uncounted(state, c.NODES_READMITTED, note, lambda status: replace(status, failed_nodes=()))


def leave_nodes(state: State, nodes: Mapping[str, Trouble]) -> Decision:
    """Start the next attempt, not counted, on nodes without a reported problem."""
    is_planned = any(trouble.planned for trouble in nodes.values())
    troubles = "; ".join(f"{name}: {trouble.message}" for name, trouble in nodes.items())
    kind = "drained" if is_planned else "unhealthy"
    note = f"attempt {state.status.attempt + 1} avoids {kind} nodes: {troubles}"
    reason = c.DRAINED if is_planned else c.NODE_UNHEALTHY
    return _begin_uncounted(state, reason, note, lambda status: avoid_nodes(status, nodes))


def resize(state: State) -> Decision:
    """Start the next attempt with another number of nodes."""
    change = f"from {state.status.attempt_nodes} to {state.spec.nodes} nodes"
    note = f"resized {change} in attempt {state.status.attempt + 1}"
    return _begin_uncounted(state, c.RESIZED, note)


def _begin_uncounted(
    state: State, reason: str, message: str, change: Callable[[Status], Status] = lambda status: status
) -> Decision:
    """Start the next attempt, not counted, although the current one has not failed. ``change``: of its nodes."""
    status = change(_build_next_attempt(state, _count_free_restart(state), reason))
    return _begin(state, status, Fact(c.RESTARTING, "True", reason, message))


def record_lost_nodes(state: State, found: tuple[tuple[PodView, str], ...], *, explains: bool) -> Decision:
    """Record nodes that were lost with pods, before the operator marks these pods as failed.

    ``explains``: the loss explains the recorded failure, which surviving pods reported. The loss replaces that failure,
    and the restart is no longer counted.
    """
    status = state.status
    pod, message = found[0]
    status = avoid_lost_nodes(status, [pod.node_name for pod, _ in found])
    if explains:
        counts = status.counts
        if not state.spec.recovery.count_disruptions and counts.used > 0:
            counts = replace(
                counts,
                counted=counts.counted - 1,
                used=counts.used - 1,
                free=counts.free + 1,
                without_progress=max(0, counts.without_progress - 1),
            )
        status = status.remember(restarts=counts)
    if explains or pod.attempt == status.attempt:
        status = replace(status, last_failure=build_node_failure(pod.attempt, pod, message, state.now))
    return Decision(status, requeue_after=AT_ONCE)


def resize_in_place(state: State) -> Decision:
    """Resize the current attempt of an elastic job; its pods join the rendezvous again."""
    waits = state.attempt_job is not None and state.attempt_job.suspended
    kept = "the job keeps its queue position" if waits else "the other pods keep running"
    message = f"resized from {state.status.attempt_nodes} to {state.spec.nodes} nodes; {kept}"
    status = state.status.remember(nodes=state.spec.nodes)
    if status.is_true(c.RENDEZVOUSED):
        restart = _build_last_restart(status, state.now, None, c.RESIZED, level=None)
        status = replace(status, last_restart=restart)
    return _begin(state, status, Fact(c.RESTARTING, "True", c.RESIZED, message))


def succeed(state: State) -> Decision:
    """End the job as succeeded, unless a feature objects."""
    verdict = state.hooks.judge(state, has_succeeded=True)
    if verdict is not None:
        return fail(state, verdict.cause, verdict.reason, verdict.message)
    nodes, admitted = _find_final_size(state)
    facts = [
        *state.hooks.conclude(state, record_final_progress(state.status, state.pods, state.now)),
        Fact(c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED, f"{nodes}/{nodes} pods scheduled{admitted}"),
        Fact(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED, f"{nodes}/{nodes} pods joined the rendezvous"),
        Fact(c.SUCCEEDED, "True", *_describe_success(state)),
        Fact(c.FAILED, "False", c.FINISHED),
    ]
    # Restarts after the last read of the pages are in the termination messages.
    ends = [(pod, pod.termination) for pod in state.pods.newest.values() if pod.termination]
    cause, counts = _count_in_place(state, list_restart_failures(ends))
    status = state.status.remember(restarts=counts)
    if cause is not None:
        restart = _build_last_restart(status, state.now, cause, c.RESTARTED_IN_PLACE, level="SamePods")
        status = replace(status, last_failure=cause, last_restart=restart)
    return _end(state, status, "Succeeded", facts)


def _find_final_size(state: State) -> tuple[int, str]:
    """Return the final number of pods of the Job, and a note if its queue admitted fewer than requested."""
    nodes = state.status.attempt_nodes
    job = state.attempt_job
    if job is None or job.nodes >= nodes or not is_queued(state.job, job):
        return nodes, ""
    return job.nodes, f"; queue admitted {job.nodes}/{nodes} pods"


def _describe_success(state: State) -> tuple[str, str]:
    """Return reason and message of the condition Succeeded."""
    nodes, admitted = _find_final_size(state)
    if state.spec.success_policy == "RankZero":
        return c.RANK_ZERO_SUCCEEDED, "pod 0 succeeded (spec.successPolicy: RankZero)"
    succeeded = sum(pod.phase == "Succeeded" for pod in state.pods.newest.values())
    if state.spec.elastic is not None and any(pod.alive for pod in state.pods):
        late = nodes - succeeded
        return c.ALL_NODES_SUCCEEDED, f"{succeeded}/{nodes} pods succeeded; {late} joined after the end of training"
    return c.ALL_NODES_SUCCEEDED, f"{nodes}/{nodes} pods succeeded{admitted}"


def fail(state: State, cause: LastFailure | None, reason: str, conclusion: str) -> Decision:
    """Fail the job. ``conclusion``: why there is no further attempt; empty if ``cause`` is the only reason."""
    status = state.status
    message = conclusion
    if cause is not None:
        status = replace(status, last_failure=replace(cause, conclusion=conclusion))
        message = f"{conclusion}; last: {describe_failure(cause)}" if conclusion else describe_failure(cause)
    facts = [Fact(c.SUCCEEDED, "False", c.FINISHED), Fact(c.FAILED, "True", reason, message)]
    return _end(state, status, "Failed", facts)


def _select_first_report(before: LastFailure | None, cause: LastFailure | None) -> LastFailure | None:
    """Return the first report of a failure: later observations of a lost node's pods are less precise."""
    if before is None or cause is None or cause.category != NODE_LOST.name:
        return cause
    same = (before.attempt, before.category, before.node_name) == (cause.attempt, cause.category, cause.node_name)
    return before if same else cause


def _build_last_restart(
    status: Status, now: datetime, failure: LastFailure | None, reason: str, level: RecoveryLevel | None = "NewPods"
) -> LastRestart:
    """Return a restart with the known part of its cost. ``level``: None if the workers have yet to restart."""
    failed = failure.time if failure else None
    started = failed if failed is not None and timedelta(0) <= now - failed < _BELIEVED else now
    attempt = status.attempt + (level == "NewPods")
    cause = failure.category if failure else reason
    restart = LastRestart(attempt=attempt, time=truncate(started), level=level, cause=cause)
    return note_steps(restart, status, failure.step if failure else None)


def _build_next_attempt(state: State, counts: RestartCounts, reason: str, failure: LastFailure | None = None) -> Status:
    """Return the status of the next attempt, with the final values of the current one."""
    final = record_final_progress(state.status, state.pods, state.now, state.observation.page)
    status = record_failed_step(final, failure)
    killed = failure if failure is not None and failure.category not in _TAKEN_AWAY else None
    if status.dev is not None and (status.dev.lost_runs or killed):
        status = begin_run(status, 0)
        counts = forget_restarts(counts)
    return replace(
        status,
        attempt=status.attempt + 1,
        job_name=child_names.job_name(state.job.name, status.attempt + 1),
        attempt_time=truncate(state.now),
        stragglers=(),
        last_restart=_build_last_restart(status, state.now, failure, reason),
        last_failure=failure or status.last_failure,
    ).remember(
        nodes=status.attempt_nodes if is_resize_waiting(state.job, state.attempt_job) else state.spec.nodes,
        restarts=replace(
            counts,
            total=counts.total + 1,
            in_place=status.counts.in_place,
            in_place_before=status.counts.in_place,
            disrupted_in_a_row=_count_disruptions_in_a_row(state, reason),
        ),
    )


def _begin(state: State, status: Status, restart: Fact | None = None) -> Decision:
    # The page is that of the former attempt.
    observation = replace_fields(state.observation, page=None, page_requested=False, failures_in_place=())
    described = describe(replace_fields(state, observation=observation), status, restart)
    return Decision(described, requeue_after=AT_ONCE)


def _end(state: State, status: Status, phase: Phase, facts: list[Fact]) -> Decision:
    status = record_final_progress(status, state.pods, state.now, state.observation.page)
    if phase == "Failed":
        status = record_failed_step(status, status.last_failure)
    facts += [
        Fact(c.SUSPENDED, "False", c.NOT_SUSPENDED),
        Fact(c.PROGRESSING, "False", c.FINISHED, "training has ended"),
        Fact(c.RESTARTING, "False", c.NOT_RESTARTING),
    ]
    ended = replace(
        status,
        phase=phase,
        completion_time=truncate(state.now),
        dev=release_pods(status.dev),
        nodes=state.pods.counts(status.attempt_nodes),
    )
    return Decision(set_conditions(ended, facts, state.now, state.job.generation), requeue_after=AT_ONCE)


def contradicts(state: State, newest: JobView) -> bool:
    """Return whether the status contradicts the newest Job, whose pods are alive.

    An attempt is written with its restart and its counts before its Job is created, while the former Job still exists.
    """
    status = state.status
    pods = state.observation.pods_of(newest.attempt)
    is_alive = any(pod.alive for pod in pods)
    if newest.finished or newest.deleting or not is_alive or newest.attempt == 0:
        return False
    if _has_invented_end(status, pods):
        return True
    is_named = status.job_name == child_names.job_name(state.job.name, status.attempt)
    if not is_named or status.counts.total != status.attempt - 1 or not has_plausible_counts(status.counts):
        return True
    if status.attempt == newest.attempt:
        has_requested_size = state.job.size_of(newest.nodes).nodes == state.spec.nodes
        return has_requested_size and status.attempt_nodes != state.spec.nodes and not is_queued(state.job, newest)
    is_announced = status.last_restart is not None and status.last_restart.attempt == status.attempt
    return not is_announced or status.attempt - newest.attempt > _MOST_WITHOUT_JOB


def _has_invented_end(status: Status, pods: Pods) -> bool:
    """Return whether a terminal condition lacks the time, or the succeeded pod, that the operator writes it with."""
    has_succeeded = status.is_true(c.SUCCEEDED)
    if has_succeeded and not any(pod.phase == "Succeeded" for pod in pods):
        return True
    ended = status.completion_time
    is_old = ended is None or (status.attempt_time is not None and ended < status.attempt_time)
    return is_old and (has_succeeded or status.is_true(c.FAILED))


def has_plausible_counts(counts: RestartCounts) -> bool:
    """Return whether no restart is counted that did not happen."""
    return 0 <= counts.used <= counts.counted <= counts.total + counts.in_place
