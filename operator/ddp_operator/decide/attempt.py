"""The current attempt as its pods and pod 0's page show it, and the accounting of its restarts. Pure.

``observe_attempt`` computes the record that every part of the status reads. ``account_restarts`` counts restarts in the
same pods and replaced pods; ``count_failure`` counts a failure against the limits of spec.recovery (docs/api.md lists
them). Restarts that start a new attempt are counted where that attempt is decided: ``attempts``.

After a failure ``find_permanent_limit`` (the next attempt would fail as well) and ``find_limit`` (a budget) return the
limit that ends the job. Deadlines, process groups and replicas end it in ``decide``, a limit that restarts in the same
pods have reached in ``attempts.note_restart_in_place``, and a success without its policy in ``attempts.succeed``.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from msgspec.structs import replace

from ddp_operator.api.job import CRASH_LOOP_FAILURES, DDPTrainingJob, JobSize
from ddp_operator.api.kubeobjects import EPOCH, truncate
from ddp_operator.api.status import Condition, LastFailure, LastRestart, Nodes, RecoveryLevel, RestartCounts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, may_have_joined
from ddp_operator.decide.diagnosis import (
    Diagnosis,
    find_disruption,
    find_first_symptom,
    find_kill_of_pod,
    find_restart_cause,
    list_lost_pods,
)
from ddp_operator.decide.kueue import is_queued, waits_in_queue
from ddp_operator.decide.losses import is_consequence, is_replacing
from ddp_operator.decide.report import Page, apply_progress, count_in_place, record_final_progress
from ddp_operator.decide.state import State
from ddp_operator.decide.views import Pods
from ddp_pod.contract.failure_table import CATEGORIES, PREEMPTED, SIGNIFICANT_SECONDS, USER_ERROR

# Pages of one incident report times that differ by less.
_SAME_INCIDENT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True)
class ObservedAttempt:
    """The pods of one attempt and what they report."""

    state: State
    recorded: Status
    """The status that the decision recorded, without the observations of this pass."""
    restart: Fact | None
    """Restarting, if the attempt starts with this pass and replaces a former one."""
    pods: Pods
    size: JobSize
    counts: Nodes
    alive: int
    """Pods that may run a process, those of former attempts included."""
    all_run: bool
    """Whether enough pods run for training."""
    trains_with_fewer: bool
    """Whether an elastic job trains although not all of its pods run."""
    rendezvoused: Condition | None
    """Rendezvoused of the pass before, if it was of this attempt."""
    was_joined: bool
    """Whether the workers of this attempt had joined the rendezvous before."""
    waits_in_queue: bool
    lost: LastFailure | None
    """The loss of the pod that was taken away first."""
    reported: Status
    """The recorded status with the progress and the checkpoint that pods report now."""

    @property
    def is_held(self) -> bool:
        """Whether all pods run, and no rank of `ddp dev` in them. Without a page they remain held."""
        if self.restart is not None or not self.all_run or self.state.spec.suspend or self.pods.has_finished_training:
            return False
        page = self.state.observation.page
        if page is not None and page.dev is not None:
            return page.is_held
        return self.recorded.dev is not None and self.recorded.dev.release_time is not None

    @property
    def is_requeued(self) -> bool:
        """Whether the queue took the pods back, so that none of them is replaced."""
        before = self.state.status.condition(c.RESTARTING)
        return self.waits_in_queue and (before is None or before.reason in (c.POD_REPLACEMENT, c.NOT_RESTARTING))

    @property
    def is_replacing(self) -> bool:
        """Whether pods are missing now that the attempt's Job replaces: it has trained, or a queued one lost a pod."""
        if self.restart is not None or self.all_run or self.state.spec.suspend:
            return False
        if not (self.was_joined or _loses_pod_in_queue(self.state)):
            return False
        before = self.state.status.condition(c.RESTARTING)
        is_resizing = before is not None and (before.status, before.reason) == ("True", c.RESIZED)
        return not (self.is_requeued or is_resizing)

    @property
    def replacement_starts(self) -> bool:
        """Whether a pod replacement starts with this pass."""
        return self.is_replacing and not self.state.status.is_true(c.RESTARTING)


def observe_attempt(state: State, status: Status, restart: Fact | None) -> ObservedAttempt:
    """Return the observed attempt of ``status``. ``restart``: why it replaces a former one."""
    job = state.job
    observation = state.observation
    pods = observation.pods_of(status.attempt)
    size = job.size_with(status.attempt_nodes)
    counts = pods.counts(size.nodes)

    same_attempt = status.attempt == job.status.attempt
    rendezvoused = job.status.condition(c.RENDEZVOUSED) if same_attempt else None
    was_joined = may_have_joined(rendezvoused)

    trains_with_fewer = restart is None and _trains_with_fewer(state, pods, size, rendezvoused)
    return ObservedAttempt(
        state=state,
        recorded=status,
        restart=restart,
        pods=pods,
        size=size,
        counts=counts,
        alive=sum(pod.alive for pod in pods) + observation.former_alive(status.attempt),
        all_run=trains_with_fewer or _has_all_pods(pods, size, counts),
        trains_with_fewer=trains_with_fewer,
        rendezvoused=rendezvoused,
        was_joined=was_joined,
        waits_in_queue=waits_in_queue(job, observation.job(status.attempt)),
        lost=_find_lost_pod(state, status.attempt, pods),
        reported=_read_progress(state, status, pods, was_joined=was_joined),
    )


def _find_lost_pod(state: State, attempt: int, pods: Pods) -> LastFailure | None:
    newest = pods.newest.values()
    return find_disruption(attempt, newest) or (find_kill_of_pod(attempt, newest) if state.job.holds_pods else None)


def _loses_pod_in_queue(state: State) -> bool:
    """Return whether a queued job loses a pod that is not being replaced yet, and a peer runs that waits for the next.

    Its launchers may not have joined: a job without a queue has a new attempt then.
    """
    has_peer = any(pod.running and not pod.disrupted for pod in state.pods)
    if is_replacing(state) or not has_peer or not is_queued(state.job, state.attempt_job):
        return False
    return any(pod.deleting or pod.disrupted for pod in list_lost_pods(state))


def _has_all_pods(pods: Pods, size: JobSize, counts: Nodes) -> bool:
    if not size.spares:
        return pods.running + counts.succeeded >= size.nodes
    present = {index for index, pod in pods.newest.items() if pod.running or pod.phase == "Succeeded"}
    return has_quorum(present, size)


def _trains_with_fewer(state: State, pods: Pods, size: JobSize, rendezvoused: Condition | None) -> bool:
    """Return whether an elastic job trains with fewer pods than nodes. Without a page the last condition counts."""
    elastic = state.spec.elastic
    if elastic is None:
        return False

    running = {pod.index for pod in pods if pod.running and pod.index < size.nodes}
    if 0 not in running or not elastic.min_nodes <= len(running) < size.nodes:
        return False

    page = state.observation.page
    if page is None or page.is_empty:
        return rendezvoused is not None and rendezvoused.reason == c.ENOUGH_RANKS_JOINED
    return page.phase in ("Running", "Held")


def _read_progress(state: State, status: Status, pods: Pods, *, was_joined: bool) -> Status:
    page = state.observation.page
    if page is not None:
        status = apply_progress(status, page.progress, page.uploads, state.now)
    elif not pods and not was_joined:
        # Pods that are deleted make steps and save them until their grace period ends, after the next attempt began.
        former = record_final_progress(status, state.observation.pods_of(status.attempt - 1), state.now)
        status = _copy_progress(status, former)

    if state.spec.suspend:
        status = _copy_progress(status, record_final_progress(status, pods, state.now))
    return status


def _copy_progress(status: Status, source: Status) -> Status:
    return replace(status, progress=source.progress, checkpoint=source.checkpoint)


def has_quorum(running: Collection[int], size: JobSize) -> bool:
    """Return whether pods of these indexes can train: all below ``nodes``, or with spares any as many with pod 0."""
    if size.spares:
        return len(running) >= size.nodes and 0 in running
    return all(index in running for index in range(size.nodes))


class RestartAccounting(NamedTuple):
    """What the status states about restarts."""

    counts: RestartCounts
    last_restart: LastRestart | None
    last_failure: LastFailure | None


def account_restarts(attempt: ObservedAttempt) -> RestartAccounting:
    """Return the restart accounting of an attempt, with the restarts that its pods report since the last pass."""
    counts = _count_restarts_in_same_pods(attempt)
    last_failure = _update_last_failure(attempt)
    interruption = _find_interruption(attempt, last_failure)
    if interruption is None:
        return RestartAccounting(counts, _update_last_restart(attempt), last_failure)

    if interruption == "ReplacedPod":
        last_failure = attempt.lost or last_failure
    counts = replace(counts, replaced=counts.replaced + 1)
    return RestartAccounting(counts, _record_interruption(attempt, interruption), last_failure)


def _find_interruption(attempt: ObservedAttempt, last_failure: LastFailure | None) -> RecoveryLevel | None:
    """Return how the attempt continues after a loss that is observed now; None: no loss, or one that is counted.

    A lost pod is replaced in its Job, or by a spare. Pods that the queue took back are new ones after admission.
    """
    if attempt.replacement_starts or _spare_took_over(attempt, last_failure):
        return "ReplacedPod"
    is_interrupted = attempt.was_joined and not attempt.all_run
    if attempt.is_requeued and is_interrupted and not _is_loss_counted(attempt):
        return "NewPods"
    return None


def count_new_restarts(status: Status, in_attempt: int) -> int:
    """Return how many restarts in the same pods are not counted yet, where a pod reports ``in_attempt`` of them."""
    return count_in_place(status.counts, in_attempt).in_place - status.counts.in_place


def note_steps(restart: LastRestart, status: Status, failed_at: int | None = None) -> LastRestart:
    """Return a restart with the last step before it, and the steps that it loses if no newer checkpoint exists.

    Without a checkpoint the loss is unknown until the next step: a script may save without reporting it.
    """
    reported = status.progress.step if status.progress else None
    step = max((number for number in (restart.step, reported, failed_at) if number is not None), default=None)
    if step is None or status.checkpoint is None:
        return replace(restart, step=step, steps_lost=None)
    return replace(restart, step=step, steps_lost=max(0, step - status.checkpoint.step))


def _count_restarts_in_same_pods(attempt: ObservedAttempt) -> RestartCounts:
    counts = attempt.recorded.counts
    page = attempt.state.observation.page
    if page is not None and page.completed_restarts is not None:
        counts = count_in_place(counts, page.completed_restarts)
    if attempt.state.spec.suspend:
        recorded = attempt.recorded.remember(restarts=counts)
        counts = record_final_progress(recorded, attempt.pods, attempt.state.now).counts
    return counts


def _update_last_restart(attempt: ObservedAttempt) -> LastRestart | None:
    """Return the last restart with its cost, as far as pods report it now."""
    restart = attempt.recorded.last_restart
    page = attempt.state.observation.page
    if page is not None:
        # A pod that was deleted by force trains on for a moment, and so do its peers, while the operator sees no pod.
        recovers = attempt.lost is None and (attempt.all_run or attempt.state.spec.elastic is not None)
        return _finish_restart(restart, page, attempt) if recovers else restart

    if attempt.pods or attempt.was_joined or restart is None or restart.attempt != attempt.recorded.attempt:
        return restart
    before = (attempt.recorded.progress, attempt.recorded.checkpoint)
    if (attempt.reported.progress, attempt.reported.checkpoint) == before:
        return restart
    return note_steps(restart, attempt.reported)


def _finish_restart(restart: LastRestart | None, page: Page, attempt: ObservedAttempt) -> LastRestart | None:
    """Return a restart with its duration and its lost steps, once the new workers have made a step."""
    # Steps since the workers' start: the run's own count comes from the checkpoint.
    stepped = page.training and page.progress.steps != 0
    if restart is None or restart.recovery_seconds is not None or not stepped:
        return restart
    if restart.level is None and restart.cause == c.RESIZED:  # the workers train on until their pods join or leave
        return restart
    # Values from a log are those of the former workers until the new ones have printed a step.
    step = page.progress.step
    progress = attempt.recorded.progress
    if step is not None and step in (restart.step, progress.step if progress else None):
        return restart

    steps_lost = restart.steps_lost
    if restart.step is not None and page.began_at is not None:
        steps_lost = max(0, restart.step - page.began_at)
    seconds = round((attempt.state.now - restart.time).total_seconds())
    return replace(restart, recovery_seconds=max(0, seconds), steps_lost=steps_lost)


def _update_last_failure(attempt: ObservedAttempt) -> LastFailure | None:
    """Return the last failure; a newer one after which workers restarted in the same pods takes its place."""
    number = attempt.recorded.attempt
    known = attempt.recorded.last_failure
    reported = attempt.state.observation.failures_in_place
    latest = max((failure.restarts for _, failure in reported), default=0)
    reported = tuple((pod, failure) for pod, failure in reported if failure.restarts == latest)
    root = find_restart_cause(number, reported)
    failure = root or find_first_symptom(number, reported)
    if failure is None or is_consequence(attempt.state, failure):
        return known
    if known is None or known.attempt != number:
        return failure

    later = (failure.time or EPOCH) - (known.time or EPOCH)
    if abs(later) > _SAME_INCIDENT:
        return failure if later > timedelta(0) else known
    # Pages of one incident are read in turn: its root cause replaces a symptom, and a symptom replaces nothing.
    if root is None or (later < timedelta(0) and not CATEGORIES[known.category].symptom):
        return known
    return failure


def _spare_took_over(attempt: ObservedAttempt, last_failure: LastFailure | None) -> bool:
    """Return whether a spare has replaced a lost pod whose loss is not counted yet."""
    if not attempt.size.spares or not attempt.was_joined or not attempt.all_run or attempt.lost is None:
        return False
    return last_failure is None or attempt.lost.pod != last_failure.pod


def _is_loss_counted(attempt: ObservedAttempt) -> bool:
    """Return whether the loss of pods has been counted since the workers joined: its pods may still terminate."""
    restart = attempt.recorded.last_restart
    joined = attempt.rendezvoused
    if restart is None or joined is None or restart.level in (None, "SamePods"):
        return False
    return restart.attempt == attempt.recorded.attempt and restart.time >= joined.last_transition_time


def _record_interruption(attempt: ObservedAttempt, level: RecoveryLevel) -> LastRestart:
    """Return a restart that starts now."""
    unseen_cause = c.POD_REPLACEMENT if level == "ReplacedPod" else PREEMPTED.name
    restart = LastRestart(
        attempt=attempt.recorded.attempt,
        level=level,
        time=truncate(attempt.state.now),
        cause=attempt.lost.category if attempt.lost else unseen_cause,
    )
    return note_steps(restart, attempt.reported)


class RestartLimit(NamedTuple):
    """Why there is no further attempt."""

    reason: str
    """Of the condition Failed."""
    conclusion: str = ""
    """The text; empty if the failure is the only reason."""


def find_permanent_limit(state: State, diagnosis: Diagnosis) -> RestartLimit | None:
    """Return why another attempt would fail in the same way; None: it may succeed."""
    cause = diagnosis.cause
    if cause is None:
        return None
    if diagnosis.repeated or _is_repeated(state, cause):
        return RestartLimit(
            c.REPEATED_FAILURE, f"not restarted: {cause.signature} occurred twice without progress in between"
        )
    return RestartLimit(cause.category, _describe_mistake(state, cause)) if diagnosis.permanent else None


def _describe_mistake(state: State, cause: LastFailure) -> str:
    """Return why the first failure of the script ends the job, and how to allow a restart; empty if it chose that."""
    if cause.category != USER_ERROR.name or not cause.signature:
        return ""
    if cause.exit_code in state.spec.recovery.non_retryable_exit_codes:
        return f"not restarted: exit code {cause.exit_code} is in recovery.nonRetryableExitCodes"
    return f"not restarted: each attempt would end with {cause.signature}; exit code 82 would restart it anyway"


def count_failure(state: State, cause: LastFailure, times: int | None = None) -> RestartCounts:
    """Return the restart accounting with a failure of the current attempt counted against ``maxRestarts``.

    ``times``: the number of failures. None: this failure, which ended its pod, and the unobserved failures that the
    launcher handled in that pod.

    A checkpoint that is ``resetAfterSteps`` further resets the count. A step beyond the highest step resets the count
    of failures without progress. If no step is reported, an attempt of ``SIGNIFICANT_SECONDS`` counts as progress.
    """
    status = record_final_progress(state.status, state.pods, state.now)
    counts = status.counts
    if times is None:
        times = 1 + _count_unobserved(state, cause)

    checkpoint = status.checkpoint.step if status.checkpoint else 0
    step = _find_step(cause, status)
    is_renewed = checkpoint - counts.checkpoint_step >= state.spec.recovery.reset_after_steps
    has_progress = step > counts.step or (step == 0 and _has_lasted(state.pods))
    return replace(
        counts,
        used=times if is_renewed else counts.used + times,
        counted=counts.counted + times,
        checkpoint_step=checkpoint if is_renewed or counts.used == 0 else counts.checkpoint_step,
        without_progress=0 if has_progress else counts.without_progress + times,
        step=max(step, counts.step),
    )


def _count_unobserved(state: State, cause: LastFailure) -> int:
    """Return the restarts in the failed pod that the operator has not counted yet, at most the remaining budget."""
    if not state.job.counts_in_place or state.spec.elastic is not None:
        return 0
    end = next((pod.termination for pod in state.pods if pod.name == cause.pod and pod.termination), None)
    if end is None:
        return 0
    unobserved = count_new_restarts(state.status, end.restarts)
    return max(0, min(unobserved, state.job.restarts_left))


def find_limit(job: DDPTrainingJob, cause: LastFailure, counted: RestartCounts) -> RestartLimit | None:
    """Return the limit that a counted failure exceeds; None: another attempt follows."""
    limit = job.spec.recovery.max_restarts
    if counted.used > limit:
        return RestartLimit(c.RESTART_BUDGET_EXHAUSTED, _describe_exhausted(counted, limit))
    if counted.without_progress >= CRASH_LOOP_FAILURES and not cause.container:
        place = f"beyond step {counted.step}" if counted.step else "before the first step"
        return RestartLimit(c.CRASH_LOOP, f"failed {counted.without_progress} times in a row without progress {place}")
    return None


def _describe_exhausted(counted: RestartCounts, limit: int) -> str:
    if counted.used == 1:
        return f"not restarted: recovery.maxRestarts is {limit}"
    since = f" since step {counted.checkpoint_step}" if counted.counted > counted.used else ""
    return f"failed {counted.used} times{since}, recovery.maxRestarts is {limit}"


def _find_step(cause: LastFailure, status: Status) -> int:
    """Return the run's step at the failure; 0: unknown.

    The failing rank reports its exact step. The page of pod 0 is some seconds older.
    """
    return cause.step or (status.progress.step if status.progress else None) or 0


def _is_repeated(state: State, cause: LastFailure) -> bool:
    """Return whether a failure of the current attempt equals the last one, without progress in between."""
    last = state.status.last_failure
    if last is None or not cause.signature or cause.signature != last.signature:
        return False
    if (cause.pod, cause.time) == (last.pod, last.time):
        return False  # the operator has already read this failure from the pod's page
    step = _find_step(cause, record_final_progress(state.status, state.pods, state.now))
    if step:
        return step <= max(last.step or 0, state.status.counts.step)
    return not _has_lasted(state.pods)


def _has_lasted(pods: Pods) -> bool:
    """Return whether a pod of the attempt ran long enough to count as progress."""
    for pod in pods:
        end = pod.termination
        if pod.started and end and end.time and end.time - pod.started.timestamp() >= SIGNIFICANT_SECONDS:
            return True
    return False
