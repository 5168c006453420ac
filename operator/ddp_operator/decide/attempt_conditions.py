"""The conditions of a job that has not ended, from its observed attempt. Pure."""

from dataclasses import dataclass

from ddp_operator.api import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ConditionStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.decision import Refusal
from ddp_operator.decide.lost_nodes import LostContact, describe_lost_contact
from ddp_operator.decide.metrics_page import Page
from ddp_operator.decide.node_health import describe_nodes
from ddp_operator.decide.observed_attempt import ObservedAttempt
from ddp_operator.decide.replacement import describe_replacement
from ddp_operator.decide.restart_accounting import RestartAccounting, is_replacing_pods, is_requeued
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.stragglers import describe_stall
from ddp_operator.decide.unreachable import describe_cut_off_training, describe_waiting
from ddp_operator.decide.usage import describe_idle

_WITHOUT_STEPS = (c.STALLED, c.PEER_UNREACHABLE, c.NO_STEP_YET)


@dataclass(frozen=True, slots=True)
class AttemptConditions:
    """The conditions of an attempt; ``restarting`` is the one on which the phase depends."""

    facts: tuple[Fact, ...]
    restarting: Fact
    has_stopped: bool
    """Whether a job that has trained makes no step now."""


def describe_conditions(attempt: ObservedAttempt, accounting: RestartAccounting, status: Status) -> AttemptConditions:
    """Return all conditions. ``status``: that of this pass, without its conditions."""
    state = attempt.state
    lost_contact = None
    if attempt.restart is None and not state.spec.suspend:
        lost_contact = describe_lost_contact(state.job, state.observation, attempt.pods)

    rendezvous = _describe_rendezvous(attempt, lost_contact)
    restarting = _describe_restarting(attempt, accounting, rendezvous, status)
    progressing = _describe_progressing(attempt, rendezvous)
    facts = (
        _describe_acceptance(attempt, state.refusal),
        describe_suspension(state.job, status, attempt.alive),
        describe_scheduling(state.job, state.observation, status.attempt, attempt.size.nodes, state.now),
        rendezvous,
        _add_lost_contact(progressing, lost_contact, status),
        restarting,
        _describe_groups(attempt),
        describe_idle(state),
        describe_nodes(state),
        _describe_uploads(attempt, status),
        Fact(c.SUCCEEDED, "False", c.NOT_FINISHED),
        Fact(c.FAILED, "False", c.NOT_FINISHED),
    )
    has_stopped = progressing.status != "True" and progressing.reason in _WITHOUT_STEPS
    return AttemptConditions(tuple(fact for fact in facts if fact is not None), restarting, has_stopped)


def describe_suspension(job: DDPTrainingJob, status: Status, alive: int) -> Fact:
    """Return Suspended of a job. ``alive``: pods that may run a process."""
    if not job.spec.suspend:
        return Fact(c.SUSPENDED, "False", c.NOT_SUSPENDED)
    if alive:
        return Fact(c.SUSPENDED, "False", c.STOPPING, f"{alive} pods are terminating gracefully")
    message = f"spec.suspend is true; set it to false to resume{_describe_saved_work(status)}"
    return Fact(c.SUSPENDED, "True", c.SUSPENDED_BY_SPEC, message)


def _describe_saved_work(status: Status) -> str:
    """Return which step is saved and how many are lost, as far as the script reports it."""
    step = (status.progress.step if status.progress else None) or 0
    if status.checkpoint is None:
        return f"; the last step was {step}, and the script reports no checkpoints" if step else ""

    saved = status.checkpoint.step
    lost = max(0, step - saved)
    return f" from the checkpoint of step {saved}" + (f"; {lost} later steps are lost" if lost else "")


def _describe_acceptance(attempt: ObservedAttempt, refusal: Refusal | None) -> Fact:
    if refusal is None:
        return Fact(c.ACCEPTED, "True", c.VALID)
    number = attempt.recorded.attempt
    consequence = f"attempt {number} cannot start"
    if attempt.state.observation.job(number) is not None:
        consequence = "the running attempt keeps the previous spec"
    status: ConditionStatus = "Unknown" if refusal.reason == c.SERVER_ERROR else "False"
    return Fact(c.ACCEPTED, status, refusal.reason, f"{consequence}: {refusal.message}")


def _describe_rendezvous(attempt: ObservedAttempt, lost_contact: LostContact | None) -> Fact:
    state = attempt.state
    if attempt.trains_with_fewer:
        message = f"{attempt.pods.running}/{attempt.size.nodes} pods are training; the rest join when they run"
        return Fact(c.RENDEZVOUSED, "True", c.ENOUGH_RANKS_JOINED, message)

    rendezvous = c.describe_rendezvous(attempt.pods, attempt.size, state.observation, attempt.rendezvoused, state.now)
    if lost_contact is not None and rendezvous.reason == c.WAITING_FOR_WORKERS:
        return Fact(c.RENDEZVOUSED, "False", c.NODE_NOT_READY, lost_contact.message)
    return describe_waiting(attempt, rendezvous)


def _describe_restarting(
    attempt: ObservedAttempt, accounting: RestartAccounting, rendezvous: Fact, status: Status
) -> Fact:
    """Return Restarting, which ends when the workers have joined the rendezvous again."""
    if attempt.restart is not None:
        return attempt.restart

    before = attempt.state.status.condition(c.RESTARTING)
    if is_requeued(attempt):
        return Fact(c.RESTARTING, "False", c.NOT_RESTARTING)
    if is_replacing_pods(attempt):
        lost = attempt.lost if accounting.replacement_starts else None
        return Fact(c.RESTARTING, "True", c.POD_REPLACEMENT, describe_replacement(status, lost))
    if before is not None and before.status == "True" and rendezvous.status == "False":
        return Fact(c.RESTARTING, "True", before.reason, before.message)
    return Fact(c.RESTARTING, "False", c.NOT_RESTARTING)


def _describe_progressing(attempt: ObservedAttempt, rendezvous: Fact) -> Fact:
    state = attempt.state
    if not attempt.all_run:
        return Fact(c.PROGRESSING, "False", c.NOT_RUNNING, "not all pods are running")

    if attempt.pods.has_finished_training:
        return c.describe_finished_training(attempt.pods)
    stall = describe_stall(state.job, state.observation)
    cut_off = describe_cut_off_training(attempt, stall) or stall
    if cut_off is not None:
        return cut_off
    if attempt.was_joined:
        unread = c.describe_lost_page(state.observation.page_lost_since, state.now)
        if unread is not None:
            return unread

    page = state.observation.page
    before = state.status.condition(c.PROGRESSING)
    stepping = page is not None and page.training
    joining = page is not None and page.joining
    keeps_training = attempt.was_joined and not joining and before is not None and before.status == "True"
    if stepping or keeps_training:
        return Fact(c.PROGRESSING, "True", c.TRAINING, "training is making progress")

    return Fact(
        c.PROGRESSING,
        "False" if rendezvous.status == "False" else "Unknown",
        c.NO_STEP_YET,
        _describe_absent_step(page),
    )


def _describe_groups(attempt: ObservedAttempt) -> Fact | None:
    """Return Distributed by pod 0's page; None: it does not change."""
    state = attempt.state
    page = state.observation.page
    if page is None or state.spec.process_group_policy == "Ignore":
        return None
    if page.groups is not None:
        return c.describe_groups(page.groups)
    if not state.status.is_false(c.DISTRIBUTED):
        return None
    return Fact(c.DISTRIBUTED, "Unknown", c.GROUP_UNKNOWN, "the ranks have shown no process group since their restart")


def _describe_absent_step(page: Page | None) -> str:
    """Return why no step is known: the launcher's own explanation with its remedy, if it has one."""
    if page is not None and page.step_hint:
        return page.step_hint
    message = "the metrics page of pod 0 reports no step"
    if page is not None and page.in_place_restarts:
        message += f" since restart {page.in_place_restarts} in the same pods"
    return message


def _add_lost_contact(progressing: Fact, lost_contact: LostContact | None, status: Status) -> Fact:
    """Return Progressing of a job, one of whose nodes may be lost: training may continue there all the same."""
    if lost_contact is None:
        return progressing
    last_step = status.progress.last_step_time if status.progress else None
    if progressing.status == "True" and last_step is not None and last_step > lost_contact.since:
        message = f"{progressing.message}; {lost_contact.message}"
        return Fact(c.PROGRESSING, "True", progressing.reason, message)
    return Fact(c.PROGRESSING, "False" if last_step else "Unknown", c.NODE_NOT_READY, lost_contact.message)


def _describe_uploads(attempt: ObservedAttempt, status: Status) -> Fact | None:
    page = attempt.state.observation.page
    checkpoint = attempt.state.spec.checkpoint
    if page is None or checkpoint is None or checkpoint.url is None:
        return None

    newest = f"newest snapshot: step {status.checkpoint.step}" if status.checkpoint else "no snapshot is known"
    if page.upload_problem:
        message = f"upload to {checkpoint.url} fails: {page.upload_problem}; {newest}"
        return Fact(c.UPLOADED, "False", c.UPLOAD_FAILING, message)
    if constants.METRIC_UPLOAD_TIME in page.values:
        return Fact(c.UPLOADED, "True", c.SNAPSHOT_UPLOADED, f"checkpoints are uploaded to {checkpoint.url}; {newest}")
    return None
