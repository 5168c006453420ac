"""Restart accounting of a running attempt: restarts in the same pods, replaced pods, their cost and their cause. Pure.

Restarts that start a new attempt are counted where that attempt is decided: ``attempts``.
"""

from dataclasses import dataclass
from datetime import timedelta

from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import EPOCH, truncate
from ddp_operator.api.status import LastFailure, LastRestart, RecoveryLevel, Restarts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.diagnosis import find_first_symptom, find_restart_cause
from ddp_operator.decide.metrics_page import Page
from ddp_operator.decide.observed_attempt import ObservedAttempt
from ddp_operator.decide.progress import count_in_place, record_final_progress
from ddp_operator.decide.replacement import is_consequence
from ddp_pod.contract.failure_table import CATEGORIES, PREEMPTED

_SAME_INCIDENT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True)
class RestartAccounting:
    """The fields of the status that count restarts, and whether a pod replacement starts with this pass."""

    restarts: Restarts
    last_restart: LastRestart | None
    last_failure: LastFailure | None
    replacement_starts: bool


def account_restarts(attempt: ObservedAttempt) -> RestartAccounting:
    """Return the restart accounting of an attempt, with the restarts that its pods report since the last pass."""
    restarts = _count_restarts_in_same_pods(attempt)
    last_restart = _update_last_restart(attempt)
    last_failure = _update_last_failure(attempt)

    replacement_starts = starts_replacement(attempt)
    if replacement_starts or _spare_took_over(attempt, last_failure):
        restarts = replace(restarts, replaced=restarts.replaced + 1)
        last_restart = _record_interruption(attempt, "ReplacedPod", c.POD_REPLACEMENT)
        last_failure = attempt.lost or last_failure

    elif is_requeued(attempt) and attempt.was_joined and not attempt.all_run and not _is_loss_counted(attempt):
        restarts = replace(restarts, replaced=restarts.replaced + 1)
        last_restart = _record_interruption(attempt, "NewPods", PREEMPTED.name)

    return RestartAccounting(restarts, last_restart, last_failure, replacement_starts)


def is_replacing_pods(attempt: ObservedAttempt) -> bool:
    """Return whether pods of an attempt that has trained are missing now, so that its Job replaces them."""
    if attempt.restart is not None or not attempt.was_joined or attempt.all_run or attempt.state.spec.suspend:
        return False
    before = attempt.state.status.condition(c.RESTARTING)
    if is_requeued(attempt):
        return False
    return before is None or before.status != "True" or before.reason != c.RESIZED


def is_requeued(attempt: ObservedAttempt) -> bool:
    """Return whether the queue took the pods back, so that none of them is replaced."""
    before = attempt.state.status.condition(c.RESTARTING)
    return attempt.waits_in_queue and (before is None or before.reason in (c.POD_REPLACEMENT, c.NOT_RESTARTING))


def starts_replacement(attempt: ObservedAttempt) -> bool:
    """Return whether a pod replacement starts with this pass."""
    return is_replacing_pods(attempt) and not attempt.state.status.is_true(c.RESTARTING)


def count_new_restarts(status: Status, in_attempt: int) -> int:
    """Return how many restarts in the same pods are not counted yet, where a pod reports ``in_attempt`` of them."""
    return count_in_place(status.restarts, in_attempt).in_place - status.restarts.in_place


def note_steps(restart: LastRestart, status: Status, failed_at: int | None = None) -> LastRestart:
    """Return a restart with the last step before it, and the steps that it loses if no newer checkpoint exists.

    Without a checkpoint the loss is unknown until the next step: a script may save without reporting it.
    """
    reported = status.progress.step if status.progress else None
    step = max((number for number in (restart.step, reported, failed_at) if number is not None), default=None)
    if step is None or status.checkpoint is None:
        return replace(restart, step=step, steps_lost=None)
    return replace(restart, step=step, steps_lost=max(0, step - status.checkpoint.step))


def _count_restarts_in_same_pods(attempt: ObservedAttempt) -> Restarts:
    restarts = attempt.recorded.restarts
    page = attempt.state.observation.page
    if page is not None and page.completed_restarts is not None:
        restarts = count_in_place(restarts, page.completed_restarts)
    if attempt.state.spec.suspend:
        stopped = record_final_progress(replace(attempt.recorded, restarts=restarts), attempt.pods, attempt.state.now)
        restarts = stopped.restarts
    return restarts


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
    stepped = page.training and page.values.get(constants.METRIC_STEPS, 1.0) > 0
    if restart is None or restart.recovery_seconds is not None or not stepped:
        return restart
    if restart.level is None and restart.cause == c.RESIZED:  # the workers train on until their pods join or leave
        return restart
    # Values from a log are those of the former workers until the new ones have printed a step.
    step = page.values.get(constants.METRIC_GLOBAL_STEP)
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


def _record_interruption(attempt: ObservedAttempt, level: RecoveryLevel, cause: str) -> LastRestart:
    """Return a restart that starts now. ``cause``: where no loss of a pod was observed."""
    restart = LastRestart(
        attempt=attempt.recorded.attempt,
        level=level,
        time=truncate(attempt.state.now),
        cause=attempt.lost.category if attempt.lost else cause,
    )
    return note_steps(restart, attempt.reported)
