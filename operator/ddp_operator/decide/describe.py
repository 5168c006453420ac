"""The status of a job that has not ended: restart accounting, observation, conditions, phase. Pure."""

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import parse_time, truncate
from ddp_operator.api.spec import Code
from ddp_operator.api.status import CodeStatus, Phase, PreflightStatus, Status, TrackingStatus
from ddp_operator.decide.attempt_conditions import describe_conditions
from ddp_operator.decide.conditions import Fact, set_conditions
from ddp_operator.decide.metrics_page import Page, compute_goodput
from ddp_operator.decide.observation import Pods, State
from ddp_operator.decide.observed_attempt import ObservedAttempt, observe_attempt
from ddp_operator.decide.progress import drop_eta, drop_pace
from ddp_operator.decide.restart_accounting import account_restarts


def describe(state: State, status: Status, restart: Fact | None = None) -> Status:
    """Return ``status``, which records the decision, with everything that is observed of its attempt.

    ``restart``: why the attempt starts, if it replaces a former one.
    """
    attempt = observe_attempt(state, status, restart)

    accounting = account_restarts(attempt)
    status = record_observation(attempt)
    status = replace(
        status,
        restarts=accounting.restarts,
        last_restart=accounting.last_restart,
        last_failure=accounting.last_failure,
    )
    conditions = describe_conditions(attempt, accounting, status)
    phase = compute_phase(attempt, conditions.restarting)

    progress = status.progress if phase == "Running" else drop_eta(status.progress)
    if conditions.has_stopped:
        progress = drop_pace(progress)
    status = replace(status, phase=phase, progress=progress, conditions=state.status.conditions)
    return set_conditions(status, conditions.facts, state.now, state.job.generation)


def record_observation(attempt: ObservedAttempt) -> Status:
    """Return the status with the counts, measurements and identities that are observed of its attempt."""
    state = attempt.state
    status = replace(attempt.reported, nodes=attempt.counts)
    if status.first_run_time is None and any(pod.has_run for pod in state.observation.pods):
        status = replace(status, first_run_time=truncate(state.now))
    if state.spec.code is not None or status.code is not None:
        status = replace(status, code=_describe_code(state.spec.code) if state.spec.code else None)
    if state.observation.page is not None:
        status = _record_page(state, status, state.observation.page, attempt.pods)
    if state.spec.tracking is not None and status.tracking is None:
        status = replace(status, tracking=TrackingStatus(run_id=state.job.tracking_run))
    if state.observation.stragglers is not None:
        status = replace(status, stragglers=state.observation.stragglers)
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
    return "Running" if attempt.all_run else "Pending"


def _describe_code(code: Code) -> CodeStatus:
    commit = ""
    if code.commit:
        commit = code.commit[:12] + ("-dirty" if code.dirty else "")
    # Two dirty trees of a commit differ in their digest alone.
    revision = commit if commit and not code.dirty else f"{commit} {code.digest[:12]}".lstrip()
    return CodeStatus(digest=code.digest, commit=code.commit, dirty=code.dirty, revision=revision)


def _record_page(state: State, status: Status, page: Page, pods: Pods) -> Status:
    """Return the status with the measurements on the metrics page of pod 0."""
    created = parse_time(state.job.created)
    wall_seconds = (state.now - created).total_seconds() if created else 0.0
    known_starts = [step for step in (status.start_step, page.began_at) if step is not None]
    start_step = min(known_starts, default=None)
    tracking = status.tracking
    if tracking is not None and page.links:
        tracking = replace(tracking, links=page.links)
    return replace(
        status,
        start_step=start_step,
        goodput=compute_goodput(page.values, wall_seconds, start_step or 0) or status.goodput,
        preflight=_name_nodes(page.preflight, status.preflight, pods) or status.preflight,
        tracking=tracking,
    )


def _name_nodes(measured: PreflightStatus | None, known: PreflightStatus | None, pods: Pods) -> PreflightStatus | None:
    """Return a preflight with the nodes of its slowest pair, as they were when that pair was first reported."""
    pair = measured.slowest_pair if measured else None
    if measured is None or pair is None:
        return measured

    named = known.slowest_pair if known else None
    if named is None or (named.pods, named.megabytes_per_second) != (pair.pods, pair.megabytes_per_second):
        nodes = tuple(pods.newest[index].node_name for index in pair.pods if index in pods.newest)
        complete = len(nodes) == len(pair.pods) and all(nodes)
        named = replace(pair, nodes=nodes if complete else ())
    return replace(measured, slowest_pair=named)
