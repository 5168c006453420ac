"""The state machine: (resource, observation, now) -> Decision. Pure, idempotent, level-triggered.

The ledger in status (attempt, attemptNodes, restarts, lastFailure, the terminal conditions) says what shall be;
children are made to follow it. Nothing about the past is kept elsewhere, so a restarted operator goes on from what it
reads.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Status
from ddp_operator.kubeobjects.timestamps import truncate
from ddp_operator.status import attempts, budget, deadlines, lost_nodes
from ddp_operator.status import conditions as c
from ddp_operator.status.cleanup import LATER, clean_up, is_about_to_fail
from ddp_operator.status.conditions import Fact
from ddp_operator.status.decision import (
    Action,
    Decision,
    DeleteJob,
    EnsureChildren,
    Refusal,
    ResizeJob,
    SuspendJob,
)
from ddp_operator.status.describe import describe, without_eta
from ddp_operator.status.diagnosis import Diagnosis, blame_image, diagnose, is_guess
from ddp_operator.status.observation import Observation, Pods
from ddp_operator.status.queueing import is_queued, was_suspending
from ddp_operator.status.scheduling import event_poll_delay
from ddp_operator.status.views import JobView, PodView

# While something is awaited that sends no event: a page, a report.
_SOON = 1.0
_RECHECK_REFUSAL = 30.0
# While a silent pod is waited for: of its node no event tells.
_RECHECK_NODE = 5.0
# A spec mostly stays bad until it is edited, but what an API server takes can be changed on its side too.
_RECHECK_SPEC = 300.0
_FIRST_STEP = timedelta(minutes=2)
# How long pods that have trained together may end one after another.
_LATE_COMERS = timedelta(seconds=30)
# How long the nodes that failed are avoided although no other can take a pod; an autoscaler may bring one.
_NODE_PATIENCE = timedelta(seconds=60)


def decide(
    job: DDPTrainingJob,
    observation: Observation,
    now: datetime,
    refusal: Refusal | None = None,
    progress_interval: float = 10.0,
) -> Decision:
    """Return what to write and what to do. ``refusal``: the spec as it stands cannot be carried out."""
    status = job.status
    if is_finished(status):
        return clean_up(job, observation, now)
    newest = max(observation.jobs, key=lambda view: view.attempt, default=None)
    if newest is not None and newest.attempt > status.attempt:
        return attempts.recover(job, observation, newest, now)
    if refusal is not None and status.attempt == 0:
        return _reject(job, refusal, now)
    if status.attempt == 0:
        return attempts.start(job, observation, now)
    attempt_job = observation.job(status.attempt)
    pods = observation.pods_of(status.attempt)
    if _is_enough(job, pods, now):
        return attempts.succeed(job, pods, now)
    if attempt_job is not None and attempt_job.complete:
        unseen = pods.counts(status.attempt_nodes).succeeded < status.attempt_nodes
        return dataclasses.replace(attempts.succeed(job, pods, now), needs_fresh_read=unseen)
    lost_now = lost_nodes.lost_pods(job, observation, now)
    if lost_now and not {pod.node_name for pod, _ in lost_now} <= set(status.failed_nodes):
        return attempts.record_lost_nodes(job, lost_now, now, explains=_explains(job, lost_now))
    if not job.spec.suspend:
        diagnosis = diagnose(
            status.attempt,
            attempt_job,
            pods,
            now,
            keeps_job=keeps_job(job, attempt_job, pods),
            since=now if was_suspending(job) else deadlines.waiting_since(job, attempt_job),
            nodes=observation.nodes,
        )
        if diagnosis is not None:
            decision = _answer_failure(job, observation, diagnosis, pods, now, refusal)
            unseen = diagnosis.secondary_only and any(pod.alive for pod in pods)
            return dataclasses.replace(decision, needs_fresh_read=unseen)
        deadline = deadlines.active(job, attempt_job, now)
        if deadline is not None and now >= deadline:
            words = f"active for longer than activeDeadlineSeconds ({job.spec.active_deadline_seconds})"
            return attempts.fail(job, pods, None, c.DEADLINE_EXCEEDED, words, now)
        pending = deadlines.pending(job, attempt_job, pods, now)
        if pending is not None and now >= pending:
            scheduled = status.condition(c.SCHEDULED)
            last = f"; last: {scheduled.message}" if scheduled and scheduled.status == "False" else ""
            words = (
                f"not all pods were running within pendingDeadlineSeconds ({job.spec.pending_deadline_seconds}){last}"
            )
            cause = blame_image(status.attempt, pods, now)
            return attempts.fail(job, pods, cause, c.PENDING_DEADLINE_EXCEEDED, words, now)
    if job.spec.nodes != status.attempt_nodes and refusal is None:
        if attempt_job is not None and _follows_size(job, attempt_job, pods):
            return attempts.resize_in_place(job, observation, now)
        return attempts.resize(job, observation, now)
    blocked = _blocked_by_avoidance(job, pods)
    if blocked is not None and now - blocked[0] >= _NODE_PATIENCE and refusal is None:
        return attempts.readmit_nodes(job, observation, blocked[1], now)
    return _follow(job, observation, attempt_job, pods, now, refusal, progress_interval)


def _is_enough(job: DDPTrainingJob, pods: Pods, now: datetime) -> bool:
    """Tell whether the pods that have succeeded are all that it takes; the others may fail when they are left alone."""
    if job.spec.success_policy == "RankZero":
        return any(pod.index == 0 and pod.phase == "Succeeded" for pod in pods)
    over = _late_comers_over(job, pods)
    return over is not None and now >= over


def _late_comers_over(job: DDPTrainingJob, pods: Pods) -> datetime | None:
    """Return when an elastic job has succeeded although some of its pods still run; None: it has to wait for them.

    Pods that train together end together, pod 0 among them. One that runs on came when training was over, and would
    wait for pod 0 until rendezvous.joinTimeoutSeconds.
    """
    newest = pods.newest
    zero = newest.get(0)
    if job.spec.elastic is None or zero is None or zero.phase != "Succeeded" or zero.termination is None:
        return None
    if zero.termination.time is None or any(pod.phase == "Failed" for pod in newest.values()):
        return None
    return datetime.fromtimestamp(zero.termination.time, UTC) + _LATE_COMERS


def is_finished(status: Status) -> bool:
    """Tell whether the job has ended for good. Terminal states absorb: nothing observed later changes them."""
    return status.is_true(c.SUCCEEDED) or status.is_true(c.FAILED)


def scrape_interval(status: Status, now: datetime, progress_interval: float) -> float:
    """Return how often pod 0's page is read, in seconds: often until the first step, at most two minutes long."""
    joined = status.condition(c.RENDEZVOUSED)
    if joined is None or joined.status == "False":
        return min(_SOON, progress_interval)
    since = joined.last_transition_time
    waiting = not status.is_true(c.PROGRESSING) and since is not None and now - since < _FIRST_STEP
    return min(_SOON, progress_interval) if waiting else progress_interval


def _answer_failure(
    job: DDPTrainingJob,
    observation: Observation,
    diagnosis: Diagnosis,
    pods: Pods,
    now: datetime,
    refusal: Refusal | None,
) -> Decision:
    cause = diagnosis.cause
    if cause is None:
        return _await_report(job, diagnosis, pods, now)
    final = budget.is_final(job, diagnosis, pods)
    if final is not None:
        return attempts.fail(job, pods, cause, *final, now)
    free = _why_free(job, diagnosis, observation.job(job.status.attempt))
    if free:
        return attempts.restart_free(job, observation, cause, free, refusal, now)
    charged = budget.charge(job, cause, pods, now)
    limit = budget.find_limit(job, cause, charged)
    if limit is not None:
        return attempts.fail(job, pods, cause, *limit, now)
    return attempts.restart(job, observation, cause, charged, refusal, now)


def _why_free(job: DDPTrainingJob, diagnosis: Diagnosis, attempt_job: JobView | None) -> str:
    """Return the reason of Restarting for a failure that costs nothing; empty: it is charged to the budget."""
    if diagnosis.disruption and not job.spec.recovery.count_disruptions:
        return c.DISRUPTED
    if diagnosis.secondary_only and _ended_in_suspension(job, attempt_job):
        return c.RESUMED
    if diagnosis.secondary_only and attempt_job is not None and attempt_job.suspended:
        return c.DISRUPTED  # its queue took the pods back
    return ""


def _await_report(job: DDPTrainingJob, diagnosis: Diagnosis, pods: Pods, now: datetime) -> Decision:
    """Say for whom it is waited before a failure counts, and change nothing else."""
    fact = Fact(c.PROGRESSING, "False", c.WAITING_FOR_PEERS, diagnosis.waiting)
    status = replace(
        job.status,
        nodes=pods.counts(job.status.attempt_nodes),
        progress=without_eta(job.status.progress),
        conditions=c.merge_conditions(job.status.conditions, [fact], now, job.generation),
    )
    left = (diagnosis.until - now).total_seconds() + 0.1 if diagnosis.until else _SOON
    return Decision(status, requeue_after=min(max(_SOON, left), _RECHECK_NODE))


def _ended_in_suspension(job: DDPTrainingJob, attempt_job: JobView | None) -> bool:
    """Tell whether the attempt ended while its pods were told to stop: a slower one then reports a lost peer."""
    if was_suspending(job):
        return True
    failed_at, resumed = attempt_job.failed_at if attempt_job else None, job.status.start_time
    return failed_at is not None and resumed is not None and failed_at < resumed


def _explains(job: DDPTrainingJob, found: tuple[tuple[PodView, str], ...]) -> bool:
    """Tell whether lost pods are the reason of the failure after which the current attempt was begun."""
    failure = job.status.last_failure
    attempts = {pod.attempt for pod, _ in found}
    return (
        failure is not None
        and failure.attempt in attempts
        and failure.attempt == job.status.attempt - 1
        and is_guess(failure)
    )


def keeps_job(job: DDPTrainingJob, attempt_job: JobView | None, pods: Pods) -> bool:
    """Tell whether a lost pod is better replaced inside its Job than answered by a new attempt (ADR 0010).

    A new Job would stand at the end of its queue again. An elastic job's other pods go on meanwhile, as long as there
    are enough and pod 0, where they meet, is among them.
    """
    if job.spec.elastic is not None:
        well = {
            pod.index
            for pod in pods
            if pod.phase == "Succeeded" or (pod.alive and not pod.deleting and not pod.disrupted)
        }
        if 0 in well and len(well) >= job.spec.elastic.min_nodes:
            return True
    return is_queued(job, attempt_job)


def _follows_size(job: DDPTrainingJob, attempt_job: JobView, pods: Pods) -> bool:
    """Tell whether the Job of an elastic job can be given another size.

    Kueue alone changes that of what it queues, and nobody that of a gang.
    """
    fixed = job.spec.elastic is None or is_queued(job, attempt_job) or any(pod.ganged for pod in pods)
    return not fixed and not attempt_job.finished and not attempt_job.deleting


def _reject(job: DDPTrainingJob, refusal: Refusal, now: datetime) -> Decision:
    undecided = refusal.reason == c.SERVER_ERROR
    facts = [Fact(c.ACCEPTED, "Unknown" if undecided else "False", refusal.reason, refusal.message)]
    status = replace(
        job.status,
        phase="Pending" if undecided else "Rejected",
        observed_generation=job.generation,
        conditions=c.merge_conditions(job.status.conditions, facts, now, job.generation),
    )
    return Decision(status, requeue_after=_RECHECK_SPEC if refusal.reason == c.INVALID_SPEC else _RECHECK_REFUSAL)


def _follow(
    job: DDPTrainingJob,
    observation: Observation,
    attempt_job: JobView | None,
    pods: Pods,
    now: datetime,
    refusal: Refusal | None,
    progress_interval: float,
) -> Decision:
    """Make the children follow the ledger, and describe what is."""
    attempt = job.status.attempt
    actions: list[Action] = [
        DeleteJob(view.name, view.uid) for view in observation.jobs if _is_obsolete(view, job, observation, now)
    ]
    waits: list[float] = []
    if attempt_job is None:
        if _former_may_run(observation, attempt):
            waits.append(LATER)
        elif refusal is not None:
            waits.append(_RECHECK_REFUSAL)
        elif (left := _held_back(job.status, now)) > 0:
            waits.append(left)
        elif not job.spec.suspend:
            actions.append(EnsureChildren(attempt, job.status.attempt_nodes))
            waits.append(LATER)  # a Job that gets no pods sends no event
    elif attempt_job.deleting:
        waits.append(LATER)  # somebody deletes it: it is made anew once it and its pods are gone
    elif observation.launcher_lost and not any(pod.alive and pod.has_run for pod in pods):
        actions.append(DeleteJob(attempt_job.name, attempt_job.uid))  # made anew with this operator's launcher
        waits.append(LATER)
    elif refusal is None and _was_edited(job, attempt_job, observation):
        actions.append(DeleteJob(attempt_job.name, attempt_job.uid))  # made anew from the spec as it is now
        waits.append(LATER)
    else:
        actions += _suspend_actions(job, attempt_job)
        if attempt_job.nodes != job.status.attempt_nodes and _follows_size(job, attempt_job, pods):
            actions.append(ResizeJob(attempt_job.name, job.status.attempt_nodes))
        if not observation.shared_complete and not attempt_job.finished and refusal is None:
            actions.append(EnsureChildren(attempt, job.status.attempt_nodes))
    described = describe(job, _note_resumption(job, now), observation, pods, refusal, now)
    if described.phase == "Running" or (described.phase == "Restarting" and pods):
        waits.append(scrape_interval(described, now, progress_interval))
    for deadline in (deadlines.active(job, attempt_job, now), deadlines.pending(job, attempt_job, pods, now)):
        if deadline is not None and not job.spec.suspend:
            waits.append(max(0.1, (deadline - now).total_seconds()))
    over = _late_comers_over(job, pods)
    if over is not None:
        waits.append(max(0.1, (over - now).total_seconds()))
    blocked = _blocked_by_avoidance(job, pods)
    if blocked is not None:
        waits.append(max(_SOON, (blocked[0] + _NODE_PATIENCE - now).total_seconds()))
    question = event_poll_delay(job, observation, now, observation.polling_jobs)
    if question is not None and not job.spec.suspend:
        waits.append(question)
    actions += lost_nodes.fail_lost_pods(job, observation, now, waits)
    return Decision(described, tuple(actions), min(waits, default=None))


def _held_back(status: Status, now: datetime) -> float:
    """Return in how many seconds the current attempt may get its pods."""
    began = status.attempt_time
    return (began + attempts.start_delay(status) - now).total_seconds() if began else 0.0


def _was_edited(job: DDPTrainingJob, attempt_job: JobView, observation: Observation) -> bool:
    """Tell whether a Job was built from another spec, which could be edited because no pod has run."""
    if job.status.first_run_time is not None or any(pod.has_run for pod in observation.pods) or attempt_job.finished:
        return False
    return attempt_job.spec_digest not in ("", job.spec_digest)


def _blocked_by_avoidance(job: DDPTrainingJob, pods: Pods) -> tuple[datetime, str] | None:
    """Return since when, and in which words, the scheduler finds no node but those that are avoided."""
    found = [
        (pod.unscheduled_since, f"{pod.name}: {pod.waiting_message}")
        for pod in pods
        if pod.phase == "Pending"
        and pod.unscheduled_since
        and pod.waiting_reason == c.UNSCHEDULABLE
        and "node affinity" in pod.waiting_message
        and pod.avoids_nodes
    ]
    return min(found, default=None)


def _former_may_run(observation: Observation, attempt: int) -> bool:
    """Tell whether a pod of another attempt runs, or may still be made by a Job that has not finished."""
    unfinished = any(view.attempt != attempt and not view.finished for view in observation.jobs)
    return unfinished or observation.former_alive(attempt) > 0


def _is_obsolete(former: JobView, job: DDPTrainingJob, observation: Observation, now: datetime) -> bool:
    """Tell whether a former attempt's Job has to go.

    The last failed one stays, for its pods' logs; also while its end is certain but the Job controller has not said so
    yet. One that would run on (a resize, an OOM kill) and older ones are deleted.
    """
    age = job.status.attempt - former.attempt
    if age < 1 or former.deleting:
        return False
    if age > 1:
        return True
    return not former.failed and not is_about_to_fail(former, job, observation, now)


def _suspend_actions(job: DDPTrainingJob, attempt_job: JobView) -> list[Action]:
    if attempt_job.finished:
        return []
    if is_queued(job, attempt_job):
        # Its queue alone changes `suspend`: it would start again what somebody else has stopped, and what somebody else
        # starts has no quota.
        return [DeleteJob(attempt_job.name, attempt_job.uid)] if job.spec.suspend else []
    if attempt_job.suspended != job.spec.suspend:
        return [SuspendJob(attempt_job.name, job.spec.suspend)]
    return []


def _note_resumption(job: DDPTrainingJob, now: datetime) -> Status:
    if not deadlines.resumes(job):
        return job.status
    return replace(job.status, start_time=truncate(now), attempt_time=truncate(now))
