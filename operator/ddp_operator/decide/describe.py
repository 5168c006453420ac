"""The status of a job that has not ended: restart accounting, observation, conditions, phase. Pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from msgspec.structs import replace

from ddp_operator.api.job import DDPTrainingJob, JobSize
from ddp_operator.api.kubeobjects import format_time, truncate
from ddp_operator.api.status import (
    Condition,
    ConditionStatus,
    Phase,
    Status,
)
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import (
    ObservedAttempt,
    account_restarts,
    count_new_restarts,
    has_quorum,
    observe_attempt,
)
from ddp_operator.decide.conditions import Fact, list_indexes, set_conditions
from ddp_operator.decide.dev import release_pods
from ddp_operator.decide.losses import (
    describe_nodes,
    describe_replacement,
    is_replacing,
)
from ddp_operator.decide.report import Page
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.state import Observation, Refusal, State
from ddp_operator.decide.views import Pods
from ddp_pod.contract.failure_table import NODE_LOST

# A launcher serves its page within a second of its start; a longer silence has another cause.
_PAGE_PATIENCE = timedelta(seconds=30)
_TIME_TO_JOIN = timedelta(minutes=3)
_UNREADABLE_PAGE = "the operator cannot read the report of pod 0"
_FOREIGN_PAGE = (
    "pod 0 serves no report: its launcher is of an older release (docs/releases.md), or another program uses its "
    "metrics port"
)
_STILL_HANDLED = "failures and lost pods are still handled, and restarts are counted when the pods end"
_PAGE_REASONS = (c.ALL_RANKS_JOINED, c.WAITING_FOR_WORKERS, c.PEER_UNREACHABLE, c.NO_METRICS_PAGE)


def describe(state: State, status: Status, restart: Fact | None = None) -> Status:
    """Return ``status``, which records the decision, with everything that is observed of its attempt.

    ``restart``: why the attempt starts, if it replaces a former one.
    """
    attempt = observe_attempt(state, status, restart)

    accounting = account_restarts(attempt)
    status = replace(
        record_observation(attempt), last_restart=accounting.last_restart, last_failure=accounting.last_failure
    ).remember(restarts=accounting.counts)
    # Last: a feature may know more of the failure, too.
    status = state.hooks.record(state, status)
    conditions = describe_conditions(attempt, status)
    phase = compute_phase(attempt, conditions.restarting)

    status = replace(status, phase=phase, conditions=state.status.conditions)
    return set_conditions(status, conditions.facts, state.now, state.job.generation)


def record_observation(attempt: ObservedAttempt) -> Status:
    """Return the status with the counts, measurements and identities that are observed of its attempt."""
    state = attempt.state
    status = replace(attempt.reported, nodes=attempt.counts)
    if status.first_run_time is None and any(pod.has_run for pod in state.observation.pods):
        status = replace(status, first_run_time=truncate(state.now))
    if not attempt.is_held:
        status = replace(status, dev=release_pods(status.dev))
    return status


def compute_phase(attempt: ObservedAttempt, restarting: Fact) -> Phase:
    """Return the phase that sums up an attempt."""
    if attempt.state.spec.suspend:
        if not attempt.alive:
            return "Suspended"
        # While pods terminate, the phase that they had describes the job better.
        before = attempt.state.status.phase
        return before if before in ("Running", "Restarting") else "Pending"
    if restarting.status == "True":
        return "Restarting"
    if attempt.is_held:
        return "Held"
    return "Running" if attempt.all_run else "Pending"


@dataclass(frozen=True, slots=True)
class AttemptConditions:
    """The conditions of an attempt; ``restarting`` is the one on which the phase depends."""

    facts: tuple[Fact, ...]
    restarting: Fact


def describe_conditions(attempt: ObservedAttempt, status: Status) -> AttemptConditions:
    """Return all conditions. ``status``: that of this pass, without its conditions."""
    state = attempt.state
    scheduled = describe_scheduling(state.job, state.observation, status.attempt, attempt.size.nodes, state.now)
    rendezvous = _describe_rendezvous(attempt)
    restarting = _describe_restarting(attempt, rendezvous, status)
    progressing = _describe_progressing(attempt, rendezvous)
    facts = (
        _describe_acceptance(attempt, state.refusal),
        describe_suspension(state.job, status, attempt.alive),
        state.hooks.explain(attempt, scheduled),
        rendezvous,
        progressing,
        restarting,
        *(remark.fact for remark in state.remarks),
        describe_nodes(state),
        _describe_features(state),
        Fact(c.SUCCEEDED, "False", c.NOT_FINISHED),
        Fact(c.FAILED, "False", c.NOT_FINISHED),
    )
    return AttemptConditions(tuple(fact for fact in facts if fact is not None), restarting)


def _describe_features(state: State) -> Fact | None:
    """Return the condition FeaturesWork; None: no feature has had a fault."""
    faults = state.observation.faults
    if faults:
        text = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        return Fact(c.FEATURES_WORK, "False", c.FEATURE_FAULT, f"the job runs without them: {text}"[:1024])
    return None if state.status.condition(c.FEATURES_WORK) is None else Fact(c.FEATURES_WORK, "True", c.NO_FAULT)


def describe_suspension(job: DDPTrainingJob, status: Status, alive: int) -> Fact:
    """Return Suspended of a job. ``alive``: pods that may run a process."""
    if not job.spec.suspend:
        return Fact(c.SUSPENDED, "False", c.NOT_SUSPENDED)
    if alive:
        return Fact(c.SUSPENDED, "False", c.STOPPING, f"{alive} pods are terminating gracefully")
    if job.held:
        return Fact(c.SUSPENDED, "True", c.QUOTA_PENDING, job.held)
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


def _describe_rendezvous(attempt: ObservedAttempt) -> Fact:
    if attempt.trains_with_fewer:
        state = "held" if attempt.is_held else "training"
        message = f"{attempt.pods.running}/{attempt.size.nodes} pods are {state}; the rest join when they run"
        return Fact(c.RENDEZVOUSED, "True", c.ENOUGH_RANKS_JOINED, message)

    return attempt.state.hooks.explain(attempt, describe_rendezvous(attempt))


def _describe_restarting(attempt: ObservedAttempt, rendezvous: Fact, status: Status) -> Fact:
    """Return Restarting, which ends when the workers have joined the rendezvous again."""
    if attempt.restart is not None:
        return attempt.restart

    before = attempt.state.status.condition(c.RESTARTING)
    if attempt.is_requeued:
        return Fact(c.RESTARTING, "False", c.NOT_RESTARTING)
    if attempt.is_replacing:
        lost = attempt.lost if attempt.replacement_starts else None
        return Fact(c.RESTARTING, "True", c.POD_REPLACEMENT, describe_replacement(status, lost))
    if before is not None and before.status == "True" and rendezvous.status == "False":
        return Fact(c.RESTARTING, "True", before.reason, before.message)
    return Fact(c.RESTARTING, "False", c.NOT_RESTARTING)


def _describe_progressing(attempt: ObservedAttempt, rendezvous: Fact) -> Fact:
    state = attempt.state
    if not attempt.all_run:
        not_running = Fact(c.PROGRESSING, "False", c.NOT_RUNNING, "not all pods are running")
        return state.hooks.explain(attempt, not_running)
    if attempt.pods.has_finished_training:
        return state.hooks.explain(attempt, describe_finished_training(attempt.pods))
    if attempt.is_held:
        return state.hooks.explain(attempt, Fact(c.PROGRESSING, "False", c.HELD, "the pods are held"))
    return state.hooks.explain(attempt, _describe_steps(attempt, rendezvous))


def _describe_steps(attempt: ObservedAttempt, rendezvous: Fact) -> Fact:
    """Return Progressing of pods that run, by pod 0's page."""
    state = attempt.state
    if attempt.was_joined:
        unread = describe_lost_page(state.observation.page_lost_since, state.now)
        if unread is not None:
            return unread

    page = state.observation.page
    before = state.status.condition(c.PROGRESSING)
    joining = page is not None and (page.joining or _awaits_replacement(attempt, page))
    stepping = page is not None and page.training and not joining
    keeps_training = attempt.was_joined and not joining and before is not None and before.status == "True"
    if stepping or keeps_training:
        awaited = page.stall.awaited if page is not None else ""
        message = f"ranks wait for a peer: {awaited}" if awaited else "training is making progress"
        return Fact(c.PROGRESSING, "True", c.TRAINING, message)

    return Fact(
        c.PROGRESSING,
        "False" if rendezvous.status == "False" else "Unknown",
        c.NO_STEP_YET,
        _describe_absent_step(page),
    )


def _describe_absent_step(page: Page | None) -> str:
    """Return why no step is known: for what ranks wait, else the launcher's own explanation with its remedy."""
    if page is not None and page.stall.awaited:
        return f"no step yet: {page.stall.awaited}"
    if page is not None and page.step_hint:
        return page.step_hint
    message = "pod 0 reports no step"
    if page is not None and page.restarts:
        message += f" since restart {page.restarts} in the same pods"
    return message


def describe_rendezvous(attempt: ObservedAttempt) -> Fact:
    """Return Rendezvoused.

    The launcher on pod 0 reports when torchrun has started the workers; a page with a step proves it too.
    """
    pods = attempt.pods
    size = attempt.size
    waiting = _describe_missing_pods(pods, size)
    if waiting is not None:
        return waiting

    observation = attempt.state.observation
    page = observation.page
    before = attempt.rendezvoused
    joined = f"{size.nodes}/{size.nodes} pods joined the rendezvous"
    if pods.has_finished_training:
        return Fact(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED, joined)
    if page is None:
        if before is not None and _keeps_without_page(observation, before):
            return Fact(c.RENDEZVOUSED, before.status, before.reason, before.message)
    elif _awaits_replacement(attempt, page):
        message = f"{size.nodes}/{size.nodes} pods running; the workers wait for a new pod in the place of the lost one"
        return Fact(c.RENDEZVOUSED, "False", c.WAITING_FOR_WORKERS, message)
    elif page.training or page.phase in ("Running", "Stopping", "Done", "Held"):
        return Fact(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED, joined)
    elif not page.phase and before is not None and before.status == "True":
        return Fact(c.RENDEZVOUSED, "True", before.reason, before.message)

    now = attempt.state.now
    all_started = all(pod.started and now - pod.started > _PAGE_PATIENCE for pod in pods.newest.values())
    has_own_page = page is not None and not page.is_empty
    if all_started and observation.page_requested and not has_own_page:
        problem = _UNREADABLE_PAGE if page is None else _FOREIGN_PAGE
        message = f"{problem}; it is unknown whether training has started; {_STILL_HANDLED}"
        return Fact(c.RENDEZVOUSED, "Unknown", c.NO_METRICS_PAGE, message)
    return Fact(c.RENDEZVOUSED, "False", c.WAITING_FOR_WORKERS, _describe_starting_workers(size, page))


def _awaits_replacement(attempt: ObservedAttempt, page: Page) -> bool:
    """Return whether the ranks of pod 0 still run as before the loss of a node: nobody has closed their connections.

    They restart when the new pod joins, which takes it the time to import PyTorch.
    """
    state = attempt.state
    failure = state.status.last_failure
    is_of_node = failure is not None and failure.category == NODE_LOST.name
    continues = state.job.spares or state.spec.elastic is not None or state.job.holds_pods
    if continues or not (is_of_node and is_replacing(state)):
        return False
    created = max(pod.created for pod in attempt.pods.newest.values())
    is_new = state.now - created < _TIME_TO_JOIN
    return is_new and page.phase == "Running" and not count_new_restarts(state.status, page.restarts)


def _describe_missing_pods(pods: Pods, size: JobSize) -> Fact | None:
    running = {index for index, pod in pods.newest.items() if pod.phase in ("Running", "Succeeded")}
    missing = [index for index in range(size.nodes) if index not in running]
    if not missing or has_quorum(running, size):
        return None
    message = f"{len(running)}/{size.nodes} pods running; waiting for pods {list_indexes(missing)}"
    return Fact(c.RENDEZVOUSED, "False", c.WAITING_FOR_RANKS, message)


def _keeps_without_page(observation: Observation, before: Condition) -> bool:
    """Return whether Rendezvoused stays unchanged until the next page: only a page can refute it."""
    return before.status == "True" or (not observation.page_requested and before.reason in _PAGE_REASONS)


def _describe_starting_workers(size: JobSize, page: Page | None) -> str:
    workers = "workers have not started yet"
    if page is not None and page.restarts:
        workers = f"workers are restarting in the same pods, restart {page.restarts}"
    phase = f" (pod 0: {page.phase})" if page is not None and page.phase else ""
    return f"{size.nodes}/{size.nodes} pods running; {workers}{phase}"


def describe_lost_page(since: datetime | None, now: datetime) -> Fact | None:
    """Return Progressing of a job that has trained, where pod 0's page has not been readable ``since``.

    None: the page was readable a moment ago. The termination messages report at the latest what the pods did.
    """
    if since is None or now - since <= _PAGE_PATIENCE:
        return None
    message = f"{_UNREADABLE_PAGE} since {format_time(since)}; progress since then is unknown; {_STILL_HANDLED}"
    return Fact(c.PROGRESSING, "Unknown", c.NO_METRICS_PAGE, message)


def describe_finished_training(pods: Pods) -> Fact:
    """Return Progressing of pods whose training containers have ended, and whose Job is not complete yet."""
    running = [pod for pod in pods.newest.values() if pod.running]
    if not running:
        message = "all ranks have ended with exit code 0; the Job controller has not completed the Job yet"
        return Fact(c.PROGRESSING, "False", c.FINISHED, message)
    more = format_more_pods(len(running) - 1)
    message = f"all ranks have ended with exit code 0; pod {running[0].name}{more} still runs"
    return Fact(c.PROGRESSING, "False", c.FINISHED, message)
