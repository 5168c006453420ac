"""Conditions: types and reasons, how they are merged into a status, and the one reason that sums them up. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.job import JobSize
from ddp_operator.api.kubeobjects import format_time, truncate
from ddp_operator.api.status import Condition, ConditionStatus, Status
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide.metrics_page import Page
from ddp_operator.decide.observation import Observation, Pods
from ddp_pod.contract.credentials import hide_credentials
from ddp_pod.contract.group_facts import ALONE, SEPARATE, TOGETHER, UNKNOWN, WAITING, GroupFacts

ACCEPTED: Final = "Accepted"
SUSPENDED: Final = "Suspended"
INPUTS_READY: Final = "InputsReady"
SCHEDULED: Final = "Scheduled"
RENDEZVOUSED: Final = "Rendezvoused"
PROGRESSING: Final = "Progressing"
RESTARTING: Final = "Restarting"
UPLOADED: Final = "CheckpointsUploaded"
DISTRIBUTED: Final = "Distributed"
TRAINING_COMPLETE: Final = "TrainingComplete"
IDLE: Final = "Idle"
NODES_HEALTHY: Final = "NodesHealthy"
SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
_FINAL_TYPES: Final = (DISTRIBUTED, TRAINING_COMPLETE, SUCCEEDED, FAILED)
_RUNNING_TYPES: Final = (ACCEPTED, SUSPENDED, INPUTS_READY, SCHEDULED, RENDEZVOUSED, PROGRESSING, RESTARTING)
TYPES: Final = (*_RUNNING_TYPES, IDLE, NODES_HEALTHY, UPLOADED, *_FINAL_TYPES)

# Accepted
VALID: Final = "Valid"
INVALID_SPEC: Final = "InvalidSpec"
VERSION_MISMATCH: Final = "VersionMismatch"
NAME_CONFLICT: Final = "NameConflict"
CLAIM_IN_USE: Final = "ClaimInUse"
PROFILE_NOT_FOUND: Final = "ProfileNotFound"
PROFILE_LOCKED: Final = "ProfileLocked"
RESOURCE_CLAIM_NOT_FOUND: Final = "ResourceClaimNotFound"
FORBIDDEN: Final = "Forbidden"
SERVER_ERROR: Final = "ServerError"
STATUS_REFUSED: Final = "StatusRefused"
# Suspended
SUSPENDED_BY_SPEC: Final = "SuspendedBySpec"
STOPPING: Final = "Stopping"
NOT_SUSPENDED: Final = "NotSuspended"
# InputsReady: also the reasons of Scheduled, of the pod that fetches. The launcher defines the failures.
FETCHED: Final = "Fetched"
NOT_FETCHED: Final = "NotFetched"
FETCHING_INPUTS: Final = "FetchingInputs"
UNREACHABLE: Final = "Unreachable"
FETCH_FAILED: Final = "FetchFailed"
FETCH_FAILURES: Final = (
    UNREACHABLE,
    FETCH_FAILED,
    "NotFound",
    "AccessDenied",
    "ChecksumMismatch",
    "NoSpace",
    "NotWritable",
    "Unsupported",
)
"""Reasons of Failed too."""
# Scheduled
ALL_PODS_SCHEDULED: Final = "AllPodsScheduled"
CHANGE_PENDING: Final = "ChangePending"  # all pods are scheduled with this reason and the next
SIDECAR_RESTARTED: Final = "SidecarRestarted"
WAITING_FOR_PODS: Final = "WaitingForPods"
WAITING_FOR_FORMER_PODS: Final = "WaitingForFormerPods"
UNSCHEDULABLE: Final = "Unschedulable"
QUOTA_PENDING: Final = "QuotaPending"
INADMISSIBLE: Final = "Inadmissible"
QUEUE_STOPPED: Final = "QueueStopped"
WORKLOAD_FINISHED: Final = "WorkloadFinished"
WORKLOAD_DEACTIVATED: Final = "WorkloadDeactivated"
WORKLOAD_MISSING: Final = "WorkloadMissing"
PODS_FORBIDDEN: Final = "PodsForbidden"
VOLUME_NOT_READY: Final = "VolumeNotReady"
IMAGE_PULL: Final = "ImagePull"
PODS_NOT_STARTING: Final = "PodsNotStarting"
BLOCKING: Final = (
    UNSCHEDULABLE,
    QUOTA_PENDING,
    INADMISSIBLE,
    QUEUE_STOPPED,
    WORKLOAD_FINISHED,
    WORKLOAD_DEACTIVATED,
    WORKLOAD_MISSING,
    PODS_FORBIDDEN,
    VOLUME_NOT_READY,
    IMAGE_PULL,
    PODS_NOT_STARTING,
)
"""Reasons that last until a person or a queue acts."""
SCHEDULED_REASONS: Final = (
    ALL_PODS_SCHEDULED,
    CHANGE_PENDING,
    SIDECAR_RESTARTED,
    WAITING_FOR_PODS,
    WAITING_FOR_FORMER_PODS,
    *BLOCKING,
)
# Rendezvoused
ALL_RANKS_JOINED: Final = "AllRanksJoined"
ENOUGH_RANKS_JOINED: Final = "EnoughRanksJoined"
WAITING_FOR_RANKS: Final = "WaitingForRanks"
INIT_CONTAINER_RUNNING: Final = "InitContainerRunning"
WAITING_FOR_WORKERS: Final = "WaitingForWorkers"
NO_METRICS_PAGE: Final = "NoMetricsPage"
PEER_UNREACHABLE: Final = "PeerUnreachable"  # of Progressing too
# Progressing
TRAINING: Final = "Training"
STALLED: Final = "Stalled"
NO_STEP_YET: Final = "NoStepYet"
NOT_RUNNING: Final = "NotRunning"
WAITING_FOR_PEERS: Final = "WaitingForPeers"
NODE_NOT_READY: Final = "NodeNotReady"  # of Rendezvoused too
# Restarting
GROUP_RESTART: Final = "GroupRestart"
POD_REPLACEMENT: Final = "PodReplacement"
RESIZED: Final = "Resized"
DISRUPTED: Final = "Disrupted"
RESUMED: Final = "Resumed"
NODES_READMITTED: Final = "NodesReadmitted"
RESTARTED_IN_PLACE: Final = "RestartedInPlace"  # of an Event alone: the pods continue
NOT_RESTARTING: Final = "NotRestarting"
# CheckpointsUploaded: only of a job with checkpoint.url
SNAPSHOT_UPLOADED: Final = "SnapshotUploaded"
UPLOAD_FAILING: Final = "UploadFailing"
# Distributed: only of a job with several ranks
PROCESS_GROUP_OF_ALL_RANKS: Final = "ProcessGroupOfAllRanks"
NO_PROCESS_GROUP: Final = "NoProcessGroup"  # of Failed too, as the next
SEPARATE_GROUPS: Final = "SeparateGroups"
WAITING_FOR_GROUP: Final = "WaitingForGroup"
GROUP_UNKNOWN: Final = "GroupUnknown"
# TrainingComplete: only of a job that has succeeded
ALL_STEPS_MADE: Final = "AllStepsMade"
TOTAL_UNKNOWN: Final = "TotalUnknown"
TRACEBACK_AT_END: Final = "TracebackAtEnd"
PROCESSES_LEFT: Final = "ProcessesLeft"
ENDED_SHORT: Final = "EndedShort"
NO_STEP: Final = "NoStep"
LOSS_NOT_FINITE: Final = "LossNotFinite"
DOUBTS: Final = (
    TRACEBACK_AT_END,
    PROCESSES_LEFT,
    NO_PROCESS_GROUP,
    SEPARATE_GROUPS,
    ENDED_SHORT,
    NO_STEP,
    LOSS_NOT_FINITE,
)
"""Reasons why a job that succeeded may not have trained as intended, the most important first."""
# Idle: only where spec.idle is set
NO_STEPS: Final = "NoSteps"
NOT_IDLE: Final = "NotIdle"
# NodesHealthy: only where recovery.nodeHealth is set
NODE_UNHEALTHY: Final = "NodeUnhealthy"  # of Restarting too
NO_TROUBLE: Final = "NoTrouble"
# Succeeded and Failed
RANK_ZERO_SUCCEEDED: Final = "RankZeroSucceeded"
PENDING_DEADLINE_EXCEEDED: Final = "PendingDeadlineExceeded"
ALL_NODES_SUCCEEDED: Final = "AllNodesSucceeded"
NOT_FINISHED: Final = "NotFinished"
RESTART_BUDGET_EXHAUSTED: Final = "RestartBudgetExhausted"
CRASH_LOOP: Final = "CrashLoop"
REPEATED_FAILURE: Final = "RepeatedFailure"
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
OPERATOR_ERROR: Final = "OperatorError"  # of `ddp run` alone: an operator in a cluster retries for ever
INTERRUPTED: Final = "Interrupted"  # of `ddp run` alone: Ctrl-C or a signal
FINISHED: Final = "Finished"


# A launcher serves its page within a second of its start; a longer silence has another cause.
_PAGE_PATIENCE = timedelta(seconds=30)
_UNREADABLE_PAGE = "the operator cannot read the metrics page of pod 0"
_FOREIGN_PAGE = "another program serves the metrics port of pod 0, so the operator cannot read the launcher's page"
_STILL_HANDLED = "failures and lost pods are still handled, and restarts are counted when the pods end"
_MAX_LISTED = 10
_PAGE_REASONS = (ALL_RANKS_JOINED, WAITING_FOR_WORKERS, PEER_UNREACHABLE, NO_METRICS_PAGE)
# Obstacles to training, the first one found is reported: type and status of the condition.
_OBSTACLES: Final = (
    (ACCEPTED, "False"),
    (ACCEPTED, "Unknown"),
    (SUSPENDED, "True"),
    (INPUTS_READY, "False"),
    (RESTARTING, "True"),
    (SCHEDULED, "False"),
    (RENDEZVOUSED, "False"),
    (DISTRIBUTED, "False"),
    (PROGRESSING, "False"),
    (RENDEZVOUSED, "Unknown"),
    (PROGRESSING, "Unknown"),
)


_GROUP_CONDITIONS: Final[Mapping[str, tuple[ConditionStatus, str]]] = {
    TOGETHER: ("True", PROCESS_GROUP_OF_ALL_RANKS),
    ALONE: ("False", NO_PROCESS_GROUP),
    SEPARATE: ("False", SEPARATE_GROUPS),
    WAITING: ("False", WAITING_FOR_GROUP),
    UNKNOWN: ("Unknown", GROUP_UNKNOWN),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A condition before it has a time."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def merge_conditions(
    previous: Iterable[Condition], facts: Iterable[Fact], now: datetime, generation: int
) -> tuple[Condition, ...]:
    """Return the conditions in the order of TYPES. A transition time changes only with the status."""
    old = {condition.type: condition for condition in previous}
    new = {fact.type: fact for fact in facts}
    merged = []
    for kind in TYPES:
        fact = new.get(kind)
        before = old.get(kind)
        if fact is None:
            if before is not None:
                merged.append(before)
            continue
        since = before.last_transition_time if before and before.status == fact.status else truncate(now)
        merged.append(
            Condition(
                type=kind,
                status=fact.status,
                reason=fact.reason,
                message=hide_credentials(fact.message)[:1024],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(merged)


def has_quorum(running: Collection[int], size: JobSize) -> bool:
    """Return whether pods of these indexes can train: all below ``nodes``, or with spares any as many with pod 0."""
    if size.spares:
        return len(running) >= size.nodes and 0 in running
    return all(index in running for index in range(size.nodes))


def describe_rendezvous(
    pods: Pods, size: JobSize, observation: Observation, before: Condition | None, now: datetime
) -> Fact:
    """Return Rendezvoused. ``before``: the condition of the pass before, if it was of this attempt.

    The launcher on pod 0 reports when torchrun has started the workers; a page with a step proves it too.
    """
    waiting = _describe_missing_pods(pods, size)
    if waiting is not None:
        return waiting

    page = observation.page
    if pods.has_finished_training:
        return Fact(RENDEZVOUSED, "True", ALL_RANKS_JOINED, f"{size.nodes}/{size.nodes} pods joined the rendezvous")
    if page is None:
        if before is not None and _keeps_without_page(observation, before):
            return Fact(RENDEZVOUSED, before.status, before.reason, before.message)
    elif page.training or page.launcher_phase in ("Running", "Stopping", "Done"):
        return Fact(RENDEZVOUSED, "True", ALL_RANKS_JOINED, f"{size.nodes}/{size.nodes} pods joined the rendezvous")
    elif not page.launcher_phase and before is not None and before.status == "True":
        return Fact(RENDEZVOUSED, "True", before.reason, before.message)

    all_started = all(pod.started and now - pod.started > _PAGE_PATIENCE for pod in pods.newest.values())
    has_own_page = page is not None and bool(page.launcher_phase or page.values)
    if all_started and observation.page_requested and not has_own_page:
        problem = _UNREADABLE_PAGE if page is None else _FOREIGN_PAGE
        message = f"{problem}; it is unknown whether training has started; {_STILL_HANDLED}"
        return Fact(RENDEZVOUSED, "Unknown", NO_METRICS_PAGE, message)
    return Fact(RENDEZVOUSED, "False", WAITING_FOR_WORKERS, _describe_starting_workers(size, page))


def _describe_missing_pods(pods: Pods, size: JobSize) -> Fact | None:
    running = {index for index, pod in pods.newest.items() if pod.phase in ("Running", "Succeeded")}
    missing = [index for index in range(size.nodes) if index not in running]
    if not missing or has_quorum(running, size):
        return None
    message = f"{len(running)}/{size.nodes} pods running; waiting for pods {list_indexes(missing)}"
    initializing = [(pod, container) for pod in pods.newest.values() if (container := pod.init_container)]
    if not initializing:
        return Fact(RENDEZVOUSED, "False", WAITING_FOR_RANKS, message)
    pod, container = initializing[0]
    more = format_more_pods(len(initializing) - 1)
    waits = f"; the startupProbe of sidecar {container.name} has not succeeded" if container.is_sidecar else ""
    message += f"; pod {pod.name}{more} runs init container {container.name} since {container.since}{waits}"
    return Fact(RENDEZVOUSED, "False", INIT_CONTAINER_RUNNING, message)


def _keeps_without_page(observation: Observation, before: Condition) -> bool:
    """Return whether Rendezvoused stays unchanged until the next page: only a page can refute it."""
    return before.status == "True" or (not observation.page_requested and before.reason in _PAGE_REASONS)


def _describe_starting_workers(size: JobSize, page: Page | None) -> str:
    workers = "workers have not started yet"
    if page is not None and page.in_place_restarts:
        workers = f"workers are restarting in the same pods, restart {page.in_place_restarts}"
    phase = f" (pod 0: {page.launcher_phase})" if page is not None and page.launcher_phase else ""
    return f"{size.nodes}/{size.nodes} pods running; {workers}{phase}"


def list_indexes(indexes: Sequence[int]) -> str:
    """Return indexes of pods or ranks separated by commas, at most ten of them."""
    shown = ", ".join(map(str, indexes[:_MAX_LISTED]))
    return f"{shown}, …" if len(indexes) > _MAX_LISTED else shown


def describe_lost_page(since: datetime | None, now: datetime) -> Fact | None:
    """Return Progressing of a job that has trained, where pod 0's page has not been readable ``since``.

    None: the page was readable a moment ago. The termination messages report at the latest what the pods did.
    """
    if since is None or now - since <= _PAGE_PATIENCE:
        return None
    message = f"{_UNREADABLE_PAGE} since {format_time(since)}; progress since then is unknown; {_STILL_HANDLED}"
    return Fact(PROGRESSING, "Unknown", NO_METRICS_PAGE, message)


def describe_finished_training(pods: Pods) -> Fact:
    """Return Progressing of pods whose training containers have ended, and whose Job is not complete yet."""
    running = [pod for pod in pods.newest.values() if pod.running]
    if not running:
        message = "all ranks have ended with exit code 0; the Job controller has not completed the Job yet"
        return Fact(PROGRESSING, "False", FINISHED, message)
    more = format_more_pods(len(running) - 1)
    containers = ", ".join(running[0].remaining_containers[:_MAX_LISTED]) or "the kubelet"
    message = f"all ranks have ended with exit code 0; pod {running[0].name}{more} waits for {containers}"
    injected = running[0].injected_containers
    if injected:
        message += f"; an admission webhook or policy of the cluster injected {injected[0]}"
    return Fact(PROGRESSING, "False", FINISHED, message)


def may_have_joined(rendezvoused: Condition | None) -> bool:
    """Return whether the workers of an attempt have joined, or all its pods run and no page can be read."""
    return rendezvoused is not None and rendezvoused.status != "False"


def describe_groups(facts: GroupFacts) -> Fact:
    """Return Distributed by the process groups that a pod has observed."""
    status, reason = _GROUP_CONDITIONS[facts.state]
    remedy = f"; {facts.remedy}" if facts.remedy else ""
    return Fact(DISTRIBUTED, status, reason, facts.message + remedy)


def describe_distribution(pods: Pods) -> Fact | None:
    """Return Distributed of pods that have succeeded; None: no pod reports its process groups."""
    ends = {index: pod.termination for index, pod in pods.newest.items() if pod.phase == "Succeeded"}
    known = {index: end.groups for index, end in ends.items() if end is not None and end.groups is not None}
    for state in (SEPARATE, ALONE, TOGETHER):
        indexes = [index for index, facts in known.items() if facts.state == state]
        if indexes:
            fact = describe_groups(known[indexes[0]])
            more = f" (the same in pods {list_indexes(indexes)})" if len(indexes) > 1 else ""
            return fact if fact.status == "True" else replace_fields(fact, message=fact.message + more)
    return describe_groups(next(iter(known.values()))) if known else None


def set_conditions(status: Status, facts: Iterable[Fact], now: datetime, generation: int) -> Status:
    """Return the status with the facts among its conditions, and the fields that ``kubectl get`` cannot compute."""
    restarts = status.restarts
    status = replace(
        status,
        observed_generation=generation,
        restarts=replace(restarts, all=restarts.total + restarts.replaced + restarts.own_in_place),
        conditions=merge_conditions(status.conditions, facts, now, generation),
    )
    return replace(status, reason=find_reason(status))


def find_obstacle(status: Status) -> Condition | None:
    """Return the most important condition that keeps a job from training; None: it trains."""
    for kind, bad in _OBSTACLES:
        condition = status.condition(kind)
        if condition is not None and (condition.status == bad or condition.reason == STOPPING):
            return condition
    return None


def find_doubts(status: Status) -> list[Condition]:
    """Return the conditions for which a job that succeeded may not have trained as intended."""
    doubts = [condition for condition in status.conditions if condition.reason in DOUBTS]
    return sorted(doubts, key=lambda condition: DOUBTS.index(condition.reason)) if status.phase == "Succeeded" else []


def find_blocker(status: Status) -> Condition | None:
    """Return Scheduled or Rendezvoused where a restarting job waits until a person or its queue acts."""
    for kind, reasons in ((SCHEDULED, BLOCKING), (RENDEZVOUSED, (PEER_UNREACHABLE, INIT_CONTAINER_RUNNING))):
        condition = status.condition(kind)
        if condition is not None and condition.status == "False" and condition.reason in reasons:
            return condition
    return None


def find_reason(status: Status) -> str:
    """Return what the job waits for or why it failed; empty for a job that trains or succeeded."""
    failure = status.last_failure
    failed = status.condition(FAILED)
    if status.phase == "Succeeded":
        return next((doubt.reason for doubt in find_doubts(status)), "")
    if failed is not None and failed.status == "True":
        return failure.category if failure is not None and failure.conclusion else failed.reason

    obstacle = find_obstacle(status)
    if obstacle is not None and obstacle.type == RESTARTING:
        obstacle = find_blocker(status) or obstacle
    if obstacle is None or obstacle.reason == SUSPENDED_BY_SPEC:  # the phase is Suspended
        return ""
    is_restarting = obstacle.reason == GROUP_RESTART or _is_restarting_in_place(status, obstacle)
    return failure.category if is_restarting and failure is not None else obstacle.reason


def _is_restarting_in_place(status: Status, obstacle: Condition) -> bool:
    """Return whether the workers start again in the same pods after the last failure."""
    restart = status.last_restart
    if obstacle.reason != WAITING_FOR_WORKERS or restart is None or status.last_failure is None:
        return False
    return restart.recovery_seconds is None and restart.cause == status.last_failure.category
