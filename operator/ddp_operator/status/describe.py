"""The status of a job that has not ended: counts, conditions, progress and the phase that sums them up. Pure."""

from collections.abc import Mapping
from datetime import datetime

from msgspec.structs import replace

from ddp_operator import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.spec import Code
from ddp_operator.api.status import (
    CheckpointStatus,
    CodeStatus,
    Condition,
    ConditionStatus,
    LastFailure,
    LastRestart,
    Phase,
    PreflightStatus,
    Progress,
    Restarts,
    Status,
    TrackingStatus,
)
from ddp_operator.kubeobjects import EPOCH, parse_time, truncate
from ddp_operator.progress import Page, Rates, build_checkpoint, build_progress, compute_goodput
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact, set_conditions
from ddp_operator.status.decision import Refusal
from ddp_operator.status.diagnosis import find_in_place, find_taken
from ddp_operator.status.lost_nodes import describe_lost_contact
from ddp_operator.status.node_health import describe_nodes
from ddp_operator.status.observation import Observation, Pods, State
from ddp_operator.status.replacement import describe_replacement, is_consequence
from ddp_operator.status.scheduling import describe_scheduling
from ddp_operator.status.stragglers import describe_stall
from ddp_operator.status.usage import describe_idle
from ddp_operator.status.waiting import waits_in_queue


def describe(state: State, status: Status, restart: Fact | None = None) -> Status:
    """Return ``status`` (whose ledger stands) with everything that is seen of its attempt.

    ``restart`` says why the attempt begins where it replaces a former one.
    """
    job, observation, refusal, now = state.job, state.observation, state.refusal, state.now
    nodes, pods = status.attempt_nodes, observation.pods_of(status.attempt)
    same_attempt = status.attempt == job.status.attempt
    former_alive = observation.former_alive(status.attempt)
    alive = sum(pod.alive for pod in pods)
    counts, running = pods.counts(nodes), pods.running
    spares = job.spares
    up = {index for index, pod in pods.newest.items() if pod.running or pod.phase == "Succeeded"}
    all_run = c.has_quorum(up, nodes, spares) if spares else running + counts.succeeded >= nodes
    joined_before = job.status.condition(c.RENDEZVOUSED) if same_attempt else None
    was_joined = same_attempt and c.may_have_joined(joined_before)
    lost = find_taken(status.attempt, pods.newest.values())
    if observation.page is not None:
        # A pod deleted by force trains on for a moment, and so do the others, when nobody sees it any more.
        recovers = lost is None and (all_run or job.spec.elastic is not None)
        status = _take_page(job, status, observation.page, pods, now, recovers=recovers)
    elif not pods and not was_joined:
        status = _take_former_report(status, observation.pods_of(status.attempt - 1), now)
    in_place = find_in_place(status.attempt, observation.failures_in_place)
    known = status.last_failure
    if in_place is not None and not is_consequence(state, in_place) and not _is_older(in_place, known):
        status = replace(status, last_failure=in_place)
    if status.first_run_time is None and any(pod.has_run for pod in observation.pods):
        status = replace(status, first_run_time=truncate(now))
    if job.spec.code is not None or status.code is not None:
        status = replace(status, code=_describe_code(job.spec.code) if job.spec.code else None)
    if job.spec.tracking is not None and status.tracking is None:
        status = replace(status, tracking=TrackingStatus(run_id=job.tracking_run))
    if observation.stragglers is not None:
        status = replace(status, stragglers=observation.stragglers)
    if job.spec.suspend:
        status = take_final_progress(status, pods, now)  # what the pods say that they have saved
    rendezvous = c.describe_rendezvous(pods, nodes, spares, observation, joined_before, now)
    if restart is None and _goes_on_with_fewer(job, pods, nodes, observation.page, joined_before):
        all_run, message = True, f"{running}/{nodes} pods training; the others join once they run"
        rendezvous = Fact(c.RENDEZVOUSED, "True", c.ENOUGH_RANKS_JOINED, message)
    cut_off = None if restart or job.spec.suspend else describe_lost_contact(job, observation, pods)
    if cut_off is not None and rendezvous.reason == c.WAITING_FOR_WORKERS:
        rendezvous = Fact(c.RENDEZVOUSED, "False", c.NODE_NOT_READY, cut_off[1])
    queues = waits_in_queue(job, observation.job(status.attempt))
    restarting = restart or _restarting(job, rendezvous, was_joined=was_joined, all_run=all_run, waits_in_queue=queues)
    replaced = restarting.reason == c.POD_REPLACEMENT and not job.status.is_true(c.RESTARTING)
    took_over = bool(
        spares and was_joined and all_run and lost and lost.pod != (status.last_failure and status.last_failure.pod)
    )
    if replaced or took_over:
        cause = lost.category if lost else c.POD_REPLACEMENT
        begun = LastRestart(attempt=status.attempt, level="ReplacedPod", time=truncate(now), cause=cause)
        status = replace(status, last_restart=note_steps(begun, status), last_failure=lost or status.last_failure)
        if replaced:
            restarting = Fact(c.RESTARTING, "True", c.POD_REPLACEMENT, describe_replacement(status, lost))
    lost_page = c.describe_lost_page(observation.page_lost_since, now) if was_joined else None
    progressing = ((describe_stall(job, observation) or lost_page) if all_run else None) or _progressing(
        job, observation.page, rendezvous, was_joined=was_joined, all_run=all_run
    )
    facts = [
        _accepted(refusal, status.attempt, observation),
        describe_suspension(job, status, alive + former_alive),
        describe_scheduling(job, observation, status.attempt, nodes, now),
        rendezvous,
        _without_a_node(status, cut_off, progressing),
        restarting,
        *filter(None, (describe_idle(state), describe_nodes(state), _uploaded(job, observation.page, status))),
        Fact(c.SUCCEEDED, "False", c.NOT_FINISHED),
        Fact(c.FAILED, "False", c.NOT_FINISHED),
    ]
    phase: Phase
    if job.spec.suspend and not alive + former_alive:
        phase = "Suspended"
    elif job.spec.suspend:  # the pods are stopping: what they were is the better word until they are gone
        phase = job.status.phase if job.status.phase in ("Running", "Restarting") else "Pending"
    elif restarting.status == "True":
        phase = "Restarting"
    else:
        phase = "Running" if all_run else "Pending"
    status = replace(
        status,
        phase=phase,
        nodes=counts,
        restarts=replace(status.restarts, replaced=status.restarts.replaced + (replaced or took_over)),
        progress=status.progress if phase == "Running" else without_eta(status.progress),
        conditions=job.status.conditions,
    )
    return set_conditions(status, facts, now, job.generation)


def _describe_code(code: Code) -> CodeStatus:
    commit = f"{code.commit[:12]}{'-dirty' if code.dirty else ''}" if code.commit else ""
    # Two dirty trees of a commit differ in their digest alone.
    revision = commit if commit and not code.dirty else f"{commit} {code.digest[:12]}".lstrip()
    return CodeStatus(digest=code.digest, commit=code.commit, dirty=code.dirty, revision=revision)


def _is_older(failure: LastFailure, known: LastFailure | None) -> bool:
    return known is not None and known.attempt == failure.attempt and (failure.time or EPOCH) < (known.time or EPOCH)


def without_eta(progress: Progress | None) -> Progress | None:
    """Return the progress of a job that makes none for now: nothing is left to wait for."""
    return None if progress is None else replace(progress, eta=None, eta_seconds=None)


def take_final_progress(status: Status, pods: Pods, now: datetime) -> Status:
    """Return the status with the values that pod 0's launcher left in its termination message."""
    ends = [pod.termination for pod in pods.newest.values() if pod.termination]
    reported = take_values(status, next((end.progress for end in ends if end.progress), {}), now)
    return replace(reported, restarts=_count_in_place(status.restarts, max((e.restarts for e in ends), default=0)))


def count_new_restarts(status: Status, of_attempt: int) -> int:
    """Return how many restarts in the same pods the ledger does not have yet, where a pod tells of so many."""
    return _count_in_place(status.restarts, of_attempt).in_place - status.restarts.in_place


def _count_in_place(restarts: Restarts, of_attempt: int) -> Restarts:
    """Return the restarts with those in the same pods of the current attempt; a new pod may count fewer for a while."""
    return replace(restarts, in_place=max(restarts.in_place, restarts.in_place_before + of_attempt))


def take_values(status: Status, values: Mapping[str, float], now: datetime, rates: Rates | None = None) -> Status:
    """Return the status with how far the job is by the series of its pod 0."""
    progress = build_progress(values, status.progress, rates) or status.progress
    return replace(status, progress=progress, checkpoint=_newer_checkpoint(values, status.checkpoint, now))


def note_steps(restart: LastRestart, status: Status, failed_at: int | None = None) -> LastRestart:
    """Return a restart with the farthest step before it, and the steps that it costs if the checkpoint is the newest.

    A script may have saved what it has not reported: without a checkpoint nothing is known until its next step.
    """
    reported = status.progress.step if status.progress else None
    step = max((one for one in (reported, failed_at) if one is not None), default=None)
    lost = None if step is None or status.checkpoint is None else max(0, step - status.checkpoint.step)
    return replace(restart, step=step, steps_lost=lost)


def _take_former_report(status: Status, former: Pods, now: datetime) -> Status:
    """Return the status with what the former attempt's pods said at their end.

    Pods that are taken away make steps and save them until their grace time is over, when the attempt that follows them
    is long in the ledger.
    """
    reported, restart = take_final_progress(status, former, now), status.last_restart
    if (reported.progress, reported.checkpoint) == (status.progress, status.checkpoint):
        return status
    if restart is not None and restart.attempt == status.attempt:
        restart = note_steps(restart, reported)
    return replace(status, progress=reported.progress, checkpoint=reported.checkpoint, last_restart=restart)


def _newer_checkpoint(
    values: Mapping[str, float], before: CheckpointStatus | None, now: datetime
) -> CheckpointStatus | None:
    found = build_checkpoint(values)
    if found is None or (before is not None and before.step == found.step):
        return before
    return replace(found, time=truncate(now))


def _take_page(job: DDPTrainingJob, status: Status, page: Page, pods: Pods, now: datetime, *, recovers: bool) -> Status:
    created = parse_time(job.created)
    wall = (now - created).total_seconds() if created else 0.0
    starts = [step for step in (status.start_step, page.began_at) if step is not None]
    start_step = min(starts, default=None)
    tracking = status.tracking
    if tracking is not None and page.links:
        tracking = replace(tracking, links=page.links)
    return replace(
        take_values(status, page.values, now, page.rates),
        last_restart=_finish_restart(status.last_restart, page, now) if recovers else status.last_restart,
        start_step=start_step,
        goodput=compute_goodput(page.values, wall, start_step or 0) or status.goodput,
        preflight=_name_nodes(page.preflight, status.preflight, pods) or status.preflight,
        tracking=tracking,
        restarts=_count_in_place(status.restarts, page.in_place_restarts),
    )


def _name_nodes(found: PreflightStatus | None, known: PreflightStatus | None, pods: Pods) -> PreflightStatus | None:
    """Return a preflight with the nodes of its slowest pair: as they were when it was first read."""
    pair = found.slowest_pair if found else None
    if found is None or pair is None:
        return found
    before = known.slowest_pair if known else None
    if before is None or (before.pods, before.megabytes_per_second) != (pair.pods, pair.megabytes_per_second):
        nodes = tuple(pods.newest[index].node_name for index in pair.pods if index in pods.newest)
        before = replace(pair, nodes=nodes if len(nodes) == len(pair.pods) and all(nodes) else ())
    return replace(found, slowest_pair=before)


def _finish_restart(restart: LastRestart | None, page: Page, now: datetime) -> LastRestart | None:
    """Return what a restart has cost, once the workers have made a step."""
    # Since the workers' start: the run's own count comes from the checkpoint.
    stepped = page.training and page.values.get(constants.METRIC_STEPS, 1.0) > 0
    if restart is None or restart.recovery_seconds is not None or not stepped:
        return restart
    known = restart.step is not None and page.began_at is not None
    return replace(
        restart,
        recovery_seconds=max(0, round((now - restart.time).total_seconds())),
        steps_lost=max(0, (restart.step or 0) - (page.began_at or 0)) if known else restart.steps_lost,
    )


def _accepted(refusal: Refusal | None, attempt: int, observation: Observation) -> Fact:
    if refusal is None:
        return Fact(c.ACCEPTED, "True", c.VALID)
    goes_on = observation.job(attempt) is not None
    what = "the running attempt keeps the previous spec" if goes_on else f"attempt {attempt} cannot start"
    state: ConditionStatus = "Unknown" if refusal.reason == c.SERVER_ERROR else "False"
    return Fact(c.ACCEPTED, state, refusal.reason, f"{what}: {refusal.message}")


def describe_suspension(job: DDPTrainingJob, status: Status, alive: int) -> Fact:
    """Return Suspended of a job with so many pods ``alive``."""
    if not job.spec.suspend:
        return Fact(c.SUSPENDED, "False", c.NOT_SUSPENDED)
    if alive:
        return Fact(c.SUSPENDED, "False", c.STOPPING, f"{alive} pods are saving and stopping")
    return Fact(
        c.SUSPENDED, "True", c.SUSPENDED_BY_SPEC, f"spec.suspend is true; set it to false to resume{_saved(status)}"
    )


def _uploaded(job: DDPTrainingJob, page: Page | None, status: Status) -> Fact | None:
    if page is None or job.spec.checkpoint is None or job.spec.checkpoint.url is None:
        return None
    url, saved = job.spec.checkpoint.url, status.checkpoint
    newest = f"the newest snapshot there is of step {saved.step}" if saved else "no step is known to be there"
    if page.upload_problem:
        message = f"what training saves is not uploaded to {url}: {page.upload_problem}; {newest}"
        return Fact(c.UPLOADED, "False", c.UPLOAD_FAILING, message)
    if constants.METRIC_UPLOAD_TIME in page.values:
        return Fact(c.UPLOADED, "True", c.SNAPSHOT_UPLOADED, f"checkpoints are in {url}; {newest}")
    return None


def _saved(status: Status) -> str:
    """Return what of the work is saved, as far as the script reports it."""
    step = (status.progress.step if status.progress else None) or 0
    if status.checkpoint is not None:
        saved, lost = status.checkpoint.step, max(0, step - status.checkpoint.step)
        return f" from the checkpoint of step {saved}" + (f"; {lost} later steps are lost" if lost else "")
    return f"; the last step was {step}, and the script reports no checkpoints" if step else ""


def _goes_on_with_fewer(
    job: DDPTrainingJob, pods: Pods, nodes: int, page: Page | None, before: Condition | None
) -> bool:
    """Tell whether an elastic job trains although not all of its pods run. Between two pages the last word counts."""
    elastic = job.spec.elastic
    running = {pod.index for pod in pods if pod.running and pod.index < nodes}
    if elastic is None or 0 not in running or not elastic.min_nodes <= len(running) < nodes:
        return False
    if page is None:
        return before is not None and before.reason == c.ENOUGH_RANKS_JOINED
    return page.launcher_phase == "Running"


def _restarting(
    job: DDPTrainingJob, rendezvous: Fact, *, was_joined: bool, all_run: bool, waits_in_queue: bool
) -> Fact:
    """A restart ends when the workers have met again."""
    before = job.status.condition(c.RESTARTING)
    if waits_in_queue and (before is None or before.reason in (c.POD_REPLACEMENT, c.NOT_RESTARTING)):
        return Fact(c.RESTARTING, "False", c.NOT_RESTARTING)  # its pods are not replaced: the queue took them back
    resizing = before is not None and before.status == "True" and before.reason == c.RESIZED
    if was_joined and not all_run and not job.spec.suspend and not resizing:
        return Fact(c.RESTARTING, "True", c.POD_REPLACEMENT, "")
    if before is not None and before.status == "True" and rendezvous.status == "False":
        return Fact(c.RESTARTING, "True", before.reason, before.message)
    return Fact(c.RESTARTING, "False", c.NOT_RESTARTING)


def _progressing(job: DDPTrainingJob, page: Page | None, rendezvous: Fact, *, was_joined: bool, all_run: bool) -> Fact:
    before = job.status.condition(c.PROGRESSING)
    if not all_run:
        return Fact(c.PROGRESSING, "False", c.NOT_RUNNING, "not all pods are running")
    stepping = page is not None and page.training
    meeting = page is not None and page.meeting
    if stepping or (was_joined and not meeting and before is not None and before.status == "True"):
        return Fact(c.PROGRESSING, "True", c.TRAINING, "training is making progress")
    message = "no step has been reported on the metrics page of pod 0"
    if page is not None and page.in_place_restarts:
        message += f" since restart {page.in_place_restarts} in the same pods"
    return Fact(c.PROGRESSING, "False" if rendezvous.status == "False" else "Unknown", c.NO_STEP_YET, message)


def _without_a_node(status: Status, cut_off: tuple[datetime, str] | None, progressing: Fact) -> Fact:
    """Return Progressing of a job, one of whose nodes may be lost: training may go on there all the same."""
    if cut_off is None:
        return progressing
    since, message = cut_off
    last_step = status.progress.last_step_time if status.progress else None
    if progressing.status == "True" and last_step is not None and last_step > since:
        return Fact(c.PROGRESSING, "True", progressing.reason, f"{progressing.message}; {message}")
    return Fact(c.PROGRESSING, "False" if last_step else "Unknown", c.NODE_NOT_READY, message)
